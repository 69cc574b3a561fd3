"""`rocline doctor --bundle`: what goes into the file that people send, and that no key, prompt or answer does."""

import json
import os
import tarfile
from types import SimpleNamespace

import pytest

from rocline.hip_kernels.linear_hip import Launched
from rocline.hip_kernels.tactics import Measured, Tactics
from rocline.tools import bundle, cli, doctor, serve
from rocline.tools.bundle import Bundle, BundleError
from rocline.tools.doctor_checks import Cards

KEY, TOML_KEY, STRAY_KEY, LOG_KEY, FILE_KEY = (
    f"sk-{word}-0123456789" for word in ("env", "toml", "stray", "log", "file")
)
PROMPT = "the patient's name is"
ANSWER_HASH = "a1" * 32
LINES = [
    {"time": 1.5, "event": "request", "id": f"chatcmpl-{LOG_KEY}", "route": "/v1/completions", "prompt_tokens": 12}
    | {"ttft_s": 0.25, "reason": "stop", "prompt": PROMPT, "output_ids_sha256": ANSWER_HASH, "messages": [PROMPT]},
    {"time": 2.5, "event": "start", "model": "/models/x", "options": {"stages": 8, "note": PROMPT}}
    | {"stages": [{"stage": 0, "device": 0, "layers": [0, 1], "name": PROMPT}], "url": f"http://x/?key={LOG_KEY}"},
    {"time": 3.5, "event": "failed", "error": f"HipError: hipMalloc of 9 bytes; key {KEY}", "busy_s": [0.5, 1.5]},
    {"time": 4.5, "event": f"Not ours: {PROMPT}", "reason": PROMPT},
]
LOG = "\n".join(
    [
        *(json.dumps(line) for line in LINES[:2]),
        "Nov 30 host rocline[7]: " + json.dumps(LINES[2]),
        json.dumps(LINES[3]),
        f"Authorization: Bearer {LOG_KEY}",
        "Traceback (most recent call last):",
        '  File "/srv/rocline/pipeline/worker.py", line 12, in run',
        f'    raise ValueError("{PROMPT}")',
        f"ValueError: {PROMPT}",
        '{"broken',
        "[1, 2]",
    ]
)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working folder with settings, keys, traces and a log, on a machine without cards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "find_cards", lambda system: Cards(why_none=f"HIP: none ({KEY})"))
    monkeypatch.setenv("ROCLINE_API_KEYS", f"{KEY},other-key-of-the-environment")
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("ROCLINE_CHUNK_ROWS", "512")
    (tmp_path / "rocline.toml").write_text(
        f'api_key_file = "{TOML_KEY}"\nkeys = ["{STRAY_KEY}"]\nserved_name = "{PROMPT}"\nstages = 4\n'
        'device = "cpu"\nengram = "mmap"\nport = "no number"\n'
    )
    (tmp_path / "server.log").write_text(LOG)
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces" / "hip-shapes-chunk1024-stage0.csv").write_text(PROMPT)
    return tmp_path


def unpacked(path):
    with tarfile.open(path) as archive:
        members = archive.getmembers()
        assert all((member.uid, member.uname, member.mtime) == (0, "", 0) for member in members)
        return {
            member.name.removeprefix("rocline-doctor/"): json.loads(archive.extractfile(member).read())
            for member in members
        }


@pytest.fixture
def packed(place, capsys):
    assert cli.main(["doctor", "--bundle", "out.tar.gz", "--log", "server.log", "--device", "cpu"]) == 0
    assert "wrote out.tar.gz: doctor.json, versions.json" in capsys.readouterr().err
    return unpacked(place / "out.tar.gz")


def test_what_is_in_it(packed):
    assert list(packed) == [
        *("doctor.json", "versions.json", "environment.json", "settings.json"),
        *("forms.json", "traces.json", "log-0.json"),
    ]
    assert packed["doctor.json"]["serves"] == {"cpu": True, "hip": False}
    assert packed["versions.json"]["python"]
    assert packed["environment.json"]["HIP_VISIBLE_DEVICES"] == "0,1"
    assert packed["traces.json"] == ["hip-shapes-chunk1024-stage0.csv"]
    assert packed["settings.json"] == {
        "file": {"api_key_file": "set", "served_name": "set", "stages": 4, "device": "cpu", "engram": "mmap"}
        | {"port": "set, not as it should be"},
        "environment": {"chunk_rows": 512},
    }


def test_forms_are_those_of_the_cards_here(tmp_path):
    product, folder = Launched("e4m3", ((1, 72, 2), (1, 40, 2))), tmp_path / "rocline"
    Tactics(folder / "tactics-gfx1100.json").add({product.key(5): Measured(2, {"1": 5.5, "2": 4.0})})
    (folder / "tactics-odd.json").write_text(
        json.dumps({PROMPT: {"form": 1, "us": {}}, product.key(1): {"form": PROMPT}})
    )
    (folder / "tactics-broken.json").write_text("{")
    assert bundle.measured_forms(folder) == {
        "tactics-gfx1100.json": {"e4m3 1x72x2+1x40x2 rows 8": {"form": 2, "us": {"1": 5.5, "2": 4.0}}},
        "tactics-odd.json": {},
    }
    assert bundle.measured_forms(tmp_path / "none") == {}
    card = SimpleNamespace(arch="gfx1100", name="Radeon Pro W7900D")
    assert Tactics.of(card, folder).path.match("tactics-gfx1100-Radeon-Pro-W7900D-*.json")


def test_settings_are_those_of_serve():
    assert {name: setting.type for name, setting in serve.SETTINGS.items()} == bundle.SETTINGS
    assert (*(serve.PREFIX, serve.CONFIG_FILE, serve.KEYS_VARIABLE),) == (
        bundle.PREFIX,
        bundle.CONFIG_FILE,
        bundle.KEYS_VARIABLE,
    )


def test_of_a_log_only_figures_and_places(packed):
    log = packed["log-0.json"]
    assert log["name"] == "server.log"
    assert log["lines"] == [
        {"time": 1.5, "prompt_tokens": 12, "ttft_s": 0.25, "event": "request", "route": "/v1/completions"}
        | {"reason": "stop"},
        {"time": 2.5, "event": "start", "stages": [{"stage": 0, "device": 0, "layers": [0, 1]}]},
        {"time": 3.5, "busy_s": [0.5, 1.5], "event": "failed", "error": "HipError: hipMalloc of 9 bytes; key [key]"},
        'File "/srv/rocline/pipeline/worker.py", line 12, in run',
    ]
    assert log["lines_left_out"] == 7


@pytest.mark.parametrize(
    "word",
    [KEY, TOML_KEY, STRAY_KEY, LOG_KEY, "other-key-of-the-environment", "hf_0123456789", PROMPT, ANSWER_HASH],
)
def test_no_key_and_no_prompt(packed, word):
    assert word not in json.dumps(packed, ensure_ascii=False)


def test_keys_of_the_key_file_are_known(place, monkeypatch):
    (place / "keys").write_text(f"{FILE_KEY}\n\nshort\n")
    monkeypatch.setenv("ROCLINE_API_KEY_FILE", "keys")
    assert FILE_KEY in bundle.known_keys(os.environ)
    quoted = 'a "quoted" \\ kéy'
    assert bundle.masked({"x": [f"1 {quoted} 2", 3]}, [quoted]) == {"x": ["1 [key] 2", 3]}


def test_the_plan_goes_in_where_there_is_one(place, monkeypatch, capsys):
    plan = doctor.doctor_plan.plan

    def with_plan(found, config, what):
        check = plan(found, config, what)
        check.values["plan"] = {"stages": [1]}
        return check

    monkeypatch.setattr(doctor.doctor_plan, "plan", with_plan)
    assert cli.main(["doctor", "--bundle", "out.tar.gz", "--device", "cpu"]) == 0
    assert unpacked("out.tar.gz")["plan.json"] == {"stages": [1]}


def test_the_home_folder_has_no_name(place, monkeypatch):
    monkeypatch.setenv("HOME", "/home/jane")
    assert bundle.masked("/home/jane/models", []) == "~/models"


def test_an_older_file_is_replaced_only_by_a_whole_one(place, monkeypatch, capsys):
    (place / "out.tar.gz").write_text("older")

    def full(*words):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bundle, "shown_settings", full)
    assert cli.main(["doctor", "--bundle", "out.tar.gz", "--device", "cpu"]) == 1
    assert "out.tar.gz: No space left on device" in capsys.readouterr().err
    assert (place / "out.tar.gz").read_text() == "older"
    assert sorted(path.name for path in place.iterdir()) == ["out.tar.gz", "rocline.toml", "server.log", "traces"]


def test_a_folder_that_cannot_be_written_is_refused(place, monkeypatch):
    def refuse(**words):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(bundle.tempfile, "mkstemp", refuse)
    with pytest.raises(BundleError, match=r"--bundle out.tar.gz: Permission denied; name a file in a folder"):
        Bundle.create(place.joinpath("out.tar.gz").relative_to(place), [])
