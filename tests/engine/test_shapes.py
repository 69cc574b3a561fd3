"""A run from shapes alone asks for the memory that the real run asks for, and computes nothing."""

import itertools
import json
import subprocess
import sys
from dataclasses import replace

import pytest
from hip_cases import write_fitting_model

from rocline.arena.trace import Recorder
from rocline.engine.home import HipHome
from rocline.engine.model import Model, split_layers
from rocline.engine.shapes import prefill_traces, shape_weights

GIB = 1 << 30


@pytest.fixture(scope="module")
def model_of(micro_model):
    """model_of(n_stages): the micro checkpoint with its weights, and what its stages take from now on."""
    whole = Model.load(micro_model)

    def make(n_stages):
        stages = split_layers(whole.config, n_stages, early_kv_side=True)
        model = Model(whole.config, whole.weights, stages)
        recorders = [Recorder(itertools.count().__next__) for _ in stages]
        for stage, recorder in zip(model.stages, recorders, strict=True):
            stage.memory.arena.recorder = recorder
        return model, stages, recorders

    return make


@pytest.mark.parametrize(("prompt_tokens", "chunk_rows"), [(200, 64), (200, 50), (37, 64), (20, 1)])
@pytest.mark.parametrize("n_stages", [1, 2, 5])
def test_the_same_requests_as_a_real_run(model_of, rng, n_stages, prompt_tokens, chunk_rows):
    model, stages, recorders = model_of(n_stages)
    ids = rng.integers(0, model.config.text_config.vocab_size, prompt_tokens).tolist()
    model.prefill(model.open(), ids, chunk_rows=chunk_rows)
    n_chunks = -(-prompt_tokens // chunk_rows)
    traces = prefill_traces(model.config, stages, prompt_tokens, chunk_rows, n_chunks)
    assert traces == [recorder.events for recorder in recorders]
    assert all(len(events) > 10 * n_chunks for events in traces)


@pytest.mark.parametrize("whose", ["kernels", "references among kernels"])
def test_a_card_on_paper_asks_for_what_the_card_asks_for(hip_device, micro_model, tmp_path, rng, whose):
    """Workspaces and uploads of kernels too, in the same order and sizes."""
    folder = micro_model if "references" in whose else write_fitting_model(micro_model, tmp_path / "model")
    whole = Model.load(folder)
    stages = split_layers(whole.config, 2, early_kv_side=True)
    home = HipHome(whole.config.text_config)
    model = Model(whole.config, whole.weights, stages, kv_tokens=1024, arena_bytes=64 << 20, home=home)
    recorders = [Recorder(itertools.count().__next__) for _ in stages]
    for stage, recorder in zip(model.stages, recorders, strict=True):
        stage.memory.arena.recorder = recorder
    model.prefill(model.open(), rng.integers(9, 400, 45).tolist(), chunk_rows=19)
    traces = prefill_traces(model.config, stages, 45, 19, 3, "hip")
    assert asked_of(traces) == asked_of([recorder.events for recorder in recorders])


def asked_of(traces):
    """Without places: another slab's are others."""
    return [[(event.action, event.operator, event.n_bytes) for event in events] for events in traces]


@pytest.mark.parametrize("n_chunks", [1, 2])
def test_only_the_last_chunks_are_recorded(model_of, n_chunks):
    model, stages, _ = model_of(2)
    whole = prefill_traces(model.config, stages, prompt_tokens=200, chunk_rows=64, n_chunks=4)
    last = prefill_traces(model.config, stages, prompt_tokens=200, chunk_rows=64, n_chunks=n_chunks)
    for events, tail in zip(whole, last, strict=True):
        assert 0 < len(tail) < len(events)
        skipped = len(events) - len(tail)
        assert tail == [replace(event, time_ns=event.time_ns - skipped) for event in events[skipped:]]
        assert tail[0].action == "take"
        assert sum(event.action == "take" for event in tail) == len(tail) / 2


def test_weights_have_their_shapes_and_no_memory(model_of):
    model, _, _ = model_of(1)
    weights = shape_weights(model.config)
    assert weights.embed_bf16.shape == model.weights.embed_bf16.shape
    assert weights.head_bf16.dtype == model.weights.head_bf16.dtype
    assert weights.embed_bf16.untyped_storage().nbytes() == 2
    assert weights.layers.keys() == model.weights.layers.keys()


RELEASE_RUN = """
import json, resource, sys
from rocline.engine.model import split_layers
from rocline.engine.release import release_config
from rocline.engine.shapes import prefill_traces

def most_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

before = most_bytes()
config = release_config()
traces = prefill_traces(config, split_layers(config, 8, early_kv_side=True), 8192, 2048, 2)
took_bytes = [max(event.n_bytes for event in events) for events in traces]
json.dump({"grew": most_bytes() - before, "largest": took_bytes}, sys.stdout)
"""


def test_the_release_runs_in_little_memory():
    """Its weights would be 467 GiB: one operator that computed would show in bytes, or in minutes."""
    done = subprocess.run([sys.executable, "-c", RELEASE_RUN], capture_output=True, text=True, timeout=120, check=True)
    found = json.loads(done.stdout)
    assert found["grew"] < 1.5 * GIB
    assert len(found["largest"]) == 8
    assert min(found["largest"][:4]) >= 2048 * 5120 * 4 * 2  # the streams of a chunk
