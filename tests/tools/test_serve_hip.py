"""`rocline serve --device hip`: the whole program over GPUs, here the CPU double's, through a real client."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from hip_cases import OPTIONS, write_fitting_model

from rocline.engine.generation import Generation
from rocline.engine.model import Model
from rocline.engine.sampling import SamplingParams
from rocline.hip_kernels.kernel import compiler
from rocline.tools.demo_checkpoint import write_demo_checkpoint

ROOT = Path(__file__).resolve().parents[2]
PROMPT = list(range(30, 70))
SETTINGS = {"device": "hip", "stages": 3, "context": 512, "kv_tokens": 1024, "chunk_rows": 32, "running": 2} | {
    "arena_gib": 0.06,
    "port": 0,
    "workers": 1,
}


@pytest.fixture(scope="module")
def folder(hip_device, data_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("fitting")
    write_demo_checkpoint(folder / "demo", seed=0)
    return write_fitting_model(data_folder / "micro" / "model", folder / "model", words_of=folder / "demo")


@pytest.fixture
def environment(hip_device, tmp_path):
    """A home whose kernel cache is that of the tests."""
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "rocline").symlink_to(compiler().folder)
    return os.environ | {"HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}


def lines_until(process, event):
    lines = []
    for line in process.stderr:
        lines.append(line)
        if line.startswith("{") and (said := json.loads(line))["event"] == event:
            return said
    raise AssertionError(f"ended with {process.wait(10)}: {''.join(lines)}")


def test_it_serves_what_the_model_says(folder, environment):
    model = Model.load(folder, device="hip", **OPTIONS)
    want = list(Generation(model, PROMPT, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)))
    words = [word for name, value in SETTINGS.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, "-m", "rocline.tools.cli", "serve", "--model", str(folder), *words]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, cwd=folder)
    try:
        url = lines_until(process, "start")["url"]
        sampling = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 2}
        body = {"input_ids": PROMPT, "sampling_params": sampling}
        assert httpx.post(url + "/generate", json=body, timeout=60).json()["output_ids"] == want
        process.send_signal(signal.SIGTERM)
        assert lines_until(process, "end")["event"] == "end"
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
