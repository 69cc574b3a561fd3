"""`rocline doctor` on cards: the CPU double's eight, which copy wrong, compute wrong and forget when they are told to.

--hip cuda or rocm runs what needs no double on the machine's own.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hip_doubles import CpuDouble

from rocline.hip_kernels.driver import Device, devices, fill_async
from rocline.hip_kernels.runtime import HipError
from rocline.pipeline import transport
from rocline.tools import cli, doctor, doctor_live
from rocline.tools.doctor_checks import Cards, Check, System, find_cards

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def found(hip_device):
    return find_cards(System())


@pytest.fixture
def double(hip_device):
    if hip_device != "cpu":
        pytest.skip("only the CPU double's copies can be disturbed")
    return CpuDouble()


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """The same work on less memory."""
    monkeypatch.setattr(transport, "CHECK_BYTES", (1, 256, 4099))
    monkeypatch.setattr(doctor_live, "RATE_BYTES", 1 << 20)
    monkeypatch.setattr(doctor_live, "CANARY_BYTES", 1 << 20)
    monkeypatch.setattr(doctor_live, "CROWD_BYTES", (1 << 16, 1 << 20, 3 << 16))


def texts(check: Check, verdict):
    return [entry.found for entry in check.entries if entry.verdict == verdict]


# The command


@pytest.fixture
def micro(data_folder):
    return str(data_folder / "micro" / "model")


def test_on_cards(found, micro, capsys):
    n = len(found.cards)
    status = cli.main(["doctor", "--model", micro, "--json"])
    out, err = capsys.readouterr()
    report = json.loads(out)
    checks = {check["name"]: check for check in report["checks"]}
    problems = [check for check in checks.values() if check["verdict"] == "problem"]
    assert (status, report["verdict"] == "problem") == ((1, True) if problems else (0, False)), problems
    assert report["serves"] == {"cpu": True, "hip": not problems}
    assert [checks[name]["verdict"] for name in ("HIP runtime", "kernel", "canary")] == ["ok"] * 3
    assert checks["kernel"]["values"]["right"] == list(range(n))
    assert len(checks["cards"]["values"]["cards"]) == n
    assert len(checks["peer copies"]["values"]["pairs"]) == n * (n - 1)
    assert all(pair["bytes_per_s"] > 0 for pair in checks["peer copies"]["values"]["pairs"])
    assert set(checks["peer copies"]["values"]["from_host_bytes_per_s"]) == {str(index) for index in range(n)}
    assert "417 tensors" in err  # the table
    assert ("copies between cards, GB/s" in err) == (n > 1)
    assert "Serves on the CPU (rocline demo): yes, on cards" in err


def test_on_the_double_the_arch_is_told_calmly(double, found, micro, capsys):
    assert cli.main(["doctor", "--model", micro, "--device", "hip"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert "cards 0-7: cpu, not gfx1100" in err
    assert "on cards (--device hip): yes." in err


def test_without_a_card(tmp_path):
    """A process of its own, in which HIP finds no library."""
    environ = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    environ |= {"PYTHONPATH": str(ROOT), "ROCM_PATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "rocline.tools.cli", "doctor", "--json"]
    done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    if "libamdhip64" in done.stderr:
        pytest.skip("this machine has a ROCm")
    report = json.loads(done.stdout)
    assert (done.returncode, report["serves"]) == (0, {"cpu": True, "hip": False}), done.stderr
    cards = next(check for check in report["checks"] if check["name"] == "cards")
    assert cards["verdict"] == "not applicable"
    assert "Serves on the CPU (rocline demo): yes, on cards (--device hip): no." in done.stderr


def test_no_card_where_one_is_asked_for(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "find_cards", lambda system: Cards(why_none="HIP: no library; install ROCm"))
    assert cli.main(["doctor", "--device", "hip"]) == 1
    assert "HIP: no library" in (err := capsys.readouterr().err)
    assert "-> install ROCm" in err
    assert cli.main(["doctor", "--device", "cpu"]) == 0


def test_a_check_that_breaks_is_a_problem_and_the_others_go_on(monkeypatch, capsys):
    def break_down():
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(doctor, "find_cards", lambda system: Cards(why_none="none"))
    monkeypatch.setattr(doctor.doctor_software, "arithmetic", break_down)
    assert cli.main(["doctor", "--json"]) == 1
    out, err = capsys.readouterr()
    assert "the check itself failed: ZeroDivisionError: division by zero" in err
    assert json.loads(out)["checks"][-1]["name"] == "processor"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "nowhere"], "nowhere"),
        (["--log", "x.log"], "--log is for --bundle"),
        (["--bundle", "nowhere/out.tar.gz"], "--bundle nowhere/out.tar.gz: No such file"),
        (["--bundle", "."], "is a folder"),
        (["--bundle", "out.tar.gz", "--log", "nowhere.log"], "--log nowhere.log: no file"),
    ],
)
def test_wrong_words_stop_before_any_check(monkeypatch, tmp_path, capsys, words, message):
    def no_check(system):
        raise AssertionError("looked at the machine")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "find_cards", no_check)
    assert cli.main(["doctor", *words]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


# Copies


def test_every_pair_copies(found):
    check = doctor_live.peer_copies(found)
    n = len(found.cards)
    assert check.verdict in ("ok", "warning")  # rates of a busy machine may differ
    assert (
        texts(check, "ok")[0]
        == f"{n * n} of {n * n} ordered pairs, each card with itself too, copy directly and to the bit"
    )


@pytest.mark.parametrize("kind", ["corrupt", "refuse"])
def test_a_pair_that_copies_wrong(double, found, kind):
    with double.fault(2, 5, kind):
        check = doctor_live.peer_copies(found)
    assert check.verdict == "warning"
    (entry,) = (entry for entry in check.entries if entry.found.startswith("from card 2 to 5: "))
    assert "iommu=pt" in entry.advice
    assert [(pair["from"], pair["to"]) for pair in check.values["through_host"]] == [(2, 5)]
    assert (2, 5) not in {(pair["from"], pair["to"]) for pair in check.values["pairs"]}
    assert len(check.values["pairs"]) == 8 * 7 - 1


def test_a_card_that_nothing_reaches(double, found):
    with double.fault(3, CpuDouble.HOST, "corrupt"):
        check = doctor_live.peer_copies(found)
    assert check.verdict == "problem"
    assert check.values["lost_cards"] == [3]
    assert set(check.values["from_host_bytes_per_s"]) == {"0", "1", "2", "4", "5", "6", "7"}
    assert all(3 not in (pair["from"], pair["to"]) for pair in check.values["pairs"])


def test_a_slow_pair_is_named(double, found, monkeypatch):
    rates = iter([1e10] * 16 + [3e9] + [1e10] * 55)  # from and to the host of eight cards, then pairs from 0 on
    monkeypatch.setattr(doctor_live, "_rate", lambda copy: next(rates))
    check = doctor_live.peer_copies(found)
    assert check.verdict == "warning"
    (text,) = texts(check, "warning")
    assert text.startswith("1 pairs are slower than half the median of 10.0 GB/s, the slowest from card 0 to 1 at 3.0")


# The kernel


def test_the_kernel_is_right(found):
    check = doctor_live.kernel(found)
    assert check.verdict == "ok"
    assert check.values["scores"] == doctor_live.ROWS * doctor_live.POSITIONS


def test_a_kernel_that_compares_wrong(found, monkeypatch):
    right = doctor_live.index_score_hip

    def one_bit_off(queries, history, scores_f32):
        right(queries, history, scores_f32)
        scores_f32.view(torch.int32)[7, 2] ^= 1

    monkeypatch.setattr(doctor_live, "index_score_hip", one_bit_off)
    check = doctor_live.kernel(Cards(found.cards[:1], found.devices[:1]))
    assert check.verdict == "problem"
    assert "card 0: index_score: 1 of 5100 scores differ, the first at (7, 2)" in texts(check, "problem")[0]


def test_a_kernel_that_does_not_compile(found, monkeypatch):
    def refuse(queries, history, scores_f32):
        raise HipError("index_score.hip gfx1100 does not compile")

    monkeypatch.setattr(doctor_live, "index_score_hip", refuse)
    assert "does not compile" in texts(doctor_live.kernel(found), "problem")[-1]


# The canary


def test_memory_stays(found):
    assert doctor_live.canary(found).verdict == "ok"


@pytest.mark.parametrize("at", [0, (1 << 20) - 8])
def test_b42_a_live_slab_that_turns_to_zeros(found, monkeypatch, at):
    slabs = []
    allocate, crowd = Device.allocate, doctor_live._crowd

    def remember(device, n_bytes):
        slabs.append(allocate(device, n_bytes))
        return slabs[-1]

    def disturb(device):
        fill_async(slabs[0].address + at, 0, 8)
        return crowd(device)

    monkeypatch.setattr(Device, "allocate", remember)
    monkeypatch.setattr(doctor_live, "_crowd", disturb)
    check = doctor_live.canary(Cards(found.cards[-1:], found.devices[-1:]))
    assert check.verdict == "problem"
    text = texts(check, "problem")[0]
    assert f"1 of {1 << 17} words of a slab changed while others came and went, the first at byte {at}: 0x0000" in text


def test_b41_memory_that_reads_zeros(found, monkeypatch):
    monkeypatch.setattr(doctor_live, "fill_async", lambda address, byte, n_bytes: fill_async(address, 0, n_bytes))
    text = texts(doctor_live.canary(found), "problem")[0]
    assert "card 0: a slab of 65536 bytes filled with 1 reads otherwise" in text


def test_nothing_is_left_on_the_cards(found):
    before = [device.memory().slab_bytes for device in devices()]
    doctor_live.peer_copies(found)
    doctor_live.canary(found)
    assert [device.memory().slab_bytes for device in devices()] == before
