"""The doctor on the host, on versions, a checkpoint and the plan: what is wrong, and its cure."""

import json
import resource
import shutil

import pytest
import torch
from doctor_machine import Machine, said
from safetensors.torch import load_file, save_file

from rocline.engine.config import ModelConfig
from rocline.engine.release import release_config
from rocline.pipeline.placement import PlacementError
from rocline.tools import doctor_disk, doctor_host, doctor_plan, doctor_software
from rocline.tools.bootstrap import ROCM_TABLE
from rocline.tools.doctor_checks import GIB, Cards, System
from rocline.tools.doctor_software import Installed


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


# The host


def test_memory_that_holds_the_tables(machine):
    check = doctor_host.host_memory(machine.system, release_config(), True)
    assert "372.0 GiB" in said(check, "ok") or "371.9 GiB" in said(check, "ok")
    assert check.values["engram_bytes"] == pytest.approx(203e9, rel=0.01)  # design.md section 8


def test_too_little_memory(machine):
    machine.write("proc/meminfo", "MemTotal: 131072000 kB\nMemAvailable: 130000000 kB\nSwapTotal: 0 kB\n")
    text = said(doctor_host.host_memory(machine.system, release_config(), True), "warning")
    assert "124.0 GiB of 125.0 GiB available; Engram's tables take 189" in text
    assert "--engram mmap" in text
    assert doctor_host.host_memory(machine.system, release_config(), False).verdict == "ok"  # nobody serves it there


def test_pages_and_swap(machine):
    machine.write("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]")
    machine.write(
        "proc/meminfo",
        "MemTotal: 400000000 kB\nMemAvailable: 390000000 kB\nSwapTotal: 8000000 kB\nSwapFree: 1000000 kB\n"
        "HugePages_Total: 1024\nHugepagesize: 2048 kB\n",
    )
    text = said(doctor_host.host_memory(machine.system, release_config(), True), "warning")
    for part in ("transparent huge pages: never", "2.0 GiB are set aside", "6.7 GiB of 7.6 GiB swap in use"):
        assert part in text


def test_low_limits(machine):
    machine.limits = {resource.RLIMIT_MEMLOCK: (8 << 20, 8 << 20), resource.RLIMIT_NOFILE: (1024, 524288)}
    text = said(doctor_host.limits(machine.system, machine.cards()), "warning")
    assert "locked memory: 8 MiB, up to 2.4 GiB are pinned" in text
    assert "LimitMEMLOCK=infinity" in text
    assert "open files: 1,024" in text
    assert doctor_host.limits(machine.system, Cards()).verdict == "ok"


def test_cores_and_nodes(machine, monkeypatch):
    monkeypatch.setattr(doctor_host.os, "sched_getaffinity", lambda pid: set(range(64)))
    check = doctor_host.processor(machine.system, machine.cards())
    assert "NUMA node 0: cards 0-3; NUMA node 1: cards 4-7" in said(check, "ok")
    machine.write("proc/sys/kernel/numa_balancing", "1")
    machine.write("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "powersave")
    machine.write("sys/devices/system/cpu/cpu0/cpufreq/scaling_driver", "acpi-cpufreq")
    text = said(doctor_host.processor(machine.system, machine.cards()), "warning")
    assert "governor powersave (acpi-cpufreq)" in text
    assert "kernel.numa_balancing=0" in text
    monkeypatch.setattr(doctor_host.os, "sched_getaffinity", lambda pid: {0, 1})
    assert "2 of" in said(doctor_host.processor(machine.system, machine.cards()), "warning")


# Versions

ROW = ROCM_TABLE[0]
GOOD = Installed("3.12.4", "0.1.0", "0123456789ab", ROW.torch.partition("==")[2], "7.2", ROW.hip_python, 70_226_015)


@pytest.fixture
def rocm(machine):
    machine.write("rocm/.info/version", f"{ROW.rocm}.1-43")
    return System(environ={"ROCM_PATH": str(machine.root / "rocm")})


@pytest.fixture
def torch_sees(monkeypatch):
    def sees(whether):
        monkeypatch.setattr(doctor_software, "torch_sees_gpus", lambda: whether)

    sees(True)
    return sees


def test_versions_of_the_table(machine, rocm, torch_sees):
    text = said(doctor_software.versions(rocm, machine.cards(), GOOD), "ok")
    assert "ROCm 7.2.1-43" in text
    assert "HIP runtime 7.2.26015" in text


@pytest.mark.parametrize(
    ("have", "verdict", "part"),
    [
        (GOOD._replace(python="3.13.1"), "warning", "tested with 3.11 and 3.12"),
        (GOOD._replace(hip_python=None), "problem", f"pip install hip-python=={ROW.hip_python}"),
        (GOOD._replace(hip_python="7.2.0.1"), "warning", f"pip install hip-python=={ROW.hip_python}"),
        (GOOD._replace(hip_python="10.0.0.0.1.2"), "problem", "is not for ROCm 7.2"),
        (GOOD._replace(torch="2.11.0+rocm7.2"), "warning", f"'{ROW.torch}'"),
    ],
)
def test_versions_beside_the_table(machine, rocm, torch_sees, have, verdict, part):
    assert part in said(doctor_software.versions(rocm, machine.cards(), have), verdict)


def test_a_torch_without_rocm(machine, rocm, torch_sees):
    torch_sees(False)
    have = GOOD._replace(torch="2.13.0+cpu", torch_hip=None)
    text = said(doctor_software.versions(rocm, machine.cards(), have), "problem")
    assert "torch 2.13.0+cpu, no ROCm build: it sees none of the 8 cards" in text
    assert f"pip install --index-url {ROW.torch_index} '{ROW.torch}'" in text


def test_a_rocm_that_is_not_listed(machine, rocm, torch_sees):
    machine.write("rocm/.info/version", "6.4.1-83")
    have = GOOD._replace(hip_runtime=60_443_483)
    assert "not in the table -> install ROCm 7.2 or 10.0" in said(
        doctor_software.versions(rocm, machine.cards(), have), "warning"
    )


def test_rocm_as_packages_of_python_is_known_by_its_runtime(machine, torch_sees, monkeypatch):
    monkeypatch.setattr(doctor_software, "find_rocm", lambda environ: None)
    assert doctor_software.versions(machine.system, machine.cards(), GOOD).verdict == "ok"
    assert doctor_software.versions(machine.system, machine.cards(), GOOD._replace(hip_runtime=6)).verdict == "warning"


@pytest.mark.parametrize("n_libraries", [0, 1, 2])
def test_exactly_one_hip_runtime(machine, n_libraries):
    lines = [f"7f00 r-xp 00000000 08:01 {n} /lib{n}/libamdhip64.so.7" for n in range(n_libraries)]
    machine.write("proc/self/maps", "\n".join(["7f00 r-xp 00000000 08:01 9 /lib/libc.so", *lines * 3]))
    check = doctor_software.one_runtime(machine.system)
    assert check.verdict == ("not applicable", "ok", "problem")[n_libraries]
    assert len(check.values["libraries"]) == n_libraries
    if n_libraries == 2:
        assert "install the torch wheel made for that ROCm" in said(check, "problem")


@pytest.mark.parametrize("name", doctor_software.ALLOCATOR_VARIABLES)
@pytest.mark.parametrize("value", ["expandable_segments:True", "max_split_size_mb:64,expandable_segments: true"])
def test_b42_expandable_segments_are_warned_about(name, value):
    text = said(doctor_software.environment(System(environ={name: value})), "warning")
    assert f"{name}={value}" in text
    assert f"unset {name}" in text


def test_b41_and_other_variables():
    environ = {"PYTORCH_HIP_ALLOC_CONF": "backend:cudaMallocAsync", "HSA_OVERRIDE_GFX_VERSION": "11.0.0"}
    environ |= {"AMD_SERIALIZE_KERNEL": "3", "HIP_VISIBLE_DEVICES": "0,1", "ROCLINE_API_KEYS": "sk-secret"}
    check = doctor_software.environment(System(environ=environ))
    text = said(check, "warning")
    for part in ("hipMallocAsync", "HSA_OVERRIDE_GFX_VERSION=11.0.0", "AMD_SERIALIZE_KERNEL=3"):
        assert part in text
    assert "sk-secret" not in str(check.as_json())
    harmless = {"PYTORCH_HIP_ALLOC_CONF": "expandable_segments:False", "HIP_LAUNCH_BLOCKING": "0"}
    assert doctor_software.environment(System(environ=harmless)).verdict == "ok"


def test_inexact_products_are_a_problem(monkeypatch):
    assert doctor_software.arithmetic().verdict == "ok"
    monkeypatch.setattr(torch.Tensor, "float", lambda self: self.to(torch.bfloat16))
    assert "rounded -> unset ONEDNN_DEFAULT_FPMATH_MODE" in said(doctor_software.arithmetic(), "problem")


# A checkpoint, and the plan


def test_a_checkpoint_by_its_headers(data_folder, tmp_path):
    folder = shutil.copytree(data_folder / "micro" / "model", tmp_path / "model")
    config = ModelConfig.load(folder)
    assert "417 tensors" in said(doctor_disk.checkpoint(folder, config), "ok")
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(100_000)
    assert "short shards" in said(doctor_disk.checkpoint(folder, config), "problem")


def test_every_shard_is_looked_at(data_folder, tmp_path):
    folder = shutil.copytree(data_folder / "micro" / "model", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(tensors)}
    for file in set(files.values()):
        save_file({name: tensor for name, tensor in tensors.items() if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    check = doctor_disk.checkpoint(folder, ModelConfig.load(folder))
    assert check.values["files"] == 2
    assert "in 2 files; every header" in said(check, "ok")
    (folder / "model-1.safetensors").unlink()
    text = said(doctor_disk.checkpoint(folder, ModelConfig.load(folder)), "problem")
    assert "model-1.safetensors: No such file" in text
    assert text.count("get these files again") == 1


def test_a_file_with_holes_says_nothing_of_the_disk(tmp_path):
    with (tmp_path / "a.safetensors").open("wb") as file:
        file.truncate(100 << 20)
    assert "the file has holes" in said(doctor_disk.disk(tmp_path), "ok")


def test_a_disk_is_timed_on_part_of_the_largest_file(tmp_path, monkeypatch, rng):
    monkeypatch.setattr(doctor_disk, "SAMPLE_BYTES", 4 << 20)
    monkeypatch.setattr(doctor_disk, "BLOCK_BYTES", 1 << 20)
    monkeypatch.setattr(doctor_disk, "LEAST_BYTES", 1 << 20)
    (tmp_path / "a.safetensors").write_bytes(rng.bytes(9 << 20))
    (tmp_path / "b.safetensors").write_bytes(b"short")
    check = doctor_disk.disk(tmp_path)
    assert (check.values["file"], check.values["read_bytes"]) == ("a.safetensors", 4 << 20)
    assert check.values["bytes_per_s"] > 0
    assert "past the page cache" in said(check, "ok") or not check.values["direct"]


def test_a_disk_that_does_not_answer_in_time(tmp_path, monkeypatch, rng):
    (tmp_path / "a.safetensors").write_bytes(rng.bytes(1 << 20))
    monkeypatch.setattr(doctor_disk, "SAMPLE_S", -1.0)  # over before the first block
    check = doctor_disk.disk(tmp_path)
    assert check.values["read_bytes"] == 0
    assert "at 0.0 GB/s" in said(check, "warning")


def test_a_file_system_without_direct_reads(tmp_path, monkeypatch, rng):
    (tmp_path / "a.safetensors").write_bytes(rng.bytes(1 << 20))
    timed = doctor_disk._timed

    def refuse_direct(path, flags):
        if flags:
            raise OSError(doctor_disk.errno.EINVAL, "Invalid argument")
        return timed(path, flags)

    monkeypatch.setattr(doctor_disk, "_timed", refuse_direct)
    check = doctor_disk.disk(tmp_path)
    assert (check.values["read_bytes"], check.values["direct"]) == (1 << 20, False)


def test_the_plan_is_of_the_fullest_card(machine, data_folder):
    config = ModelConfig.load(data_folder / "micro" / "model")
    check = doctor_plan.plan(machine.cards(c2={"free_bytes": 5 * GIB}), config, "micro")
    assert "micro on 5 cards with 5.0 GiB free fits" in said(check, "ok")
    assert check.values["plan"]["devices"][0]["capacity_bytes"] == 5 * GIB


@pytest.mark.parametrize(
    ("told", "found", "advice"),
    [
        ("too little: 5 of 6; --kv-tokens 7 fits", "too little: 5 of 6", "--kv-tokens 7 fits"),
        ("no", "no", "see rocline"),
    ],
)
def test_a_plan_that_is_refused_says_what_would_fit(machine, monkeypatch, told, found, advice):
    def refuse(config, request):
        raise PlacementError(told)

    monkeypatch.setattr(doctor_plan, "make_plan", refuse)
    check = doctor_plan.plan(machine.cards(), release_config(), "the release")
    assert f"the release on 8 cards with 47.9 GiB free: {found} -> {advice}" in said(check, "problem")
