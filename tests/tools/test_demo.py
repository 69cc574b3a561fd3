"""`rocline demo`, shortened: the whole show with a real client over a real server, and wrong input."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest

from rocline.tools import cli
from rocline.tools.demo_checkpoint import write_demo_checkpoint

# A shorter document, still past the 512 candidate positions.
SHORT = "from rocline.tools import cli, demo; demo.TOKENS = 640; demo.CANDIDATE_TOKENS = 600; "
WITHOUT_PLAN = "demo._Show._plan = lambda self: None; "
RUN = "import sys; sys.exit(cli.main(sys.argv[1:]))"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    write_demo_checkpoint(folder, seed=0)
    return folder


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def command(*words: object, change: str = "") -> list[str]:
    return [sys.executable, "-c", SHORT + change + RUN, "demo", *map(str, words)]


def demo(*words: object) -> subprocess.CompletedProcess[str]:
    wide = os.environ | {"COLUMNS": "120"}
    return subprocess.run(command(*words), capture_output=True, text=True, timeout=400, env=wide)


def test_the_show_runs_to_its_end(checkpoint, tmp_path):
    done = demo(checkpoint, "--once", "--port", free_port(), "--out", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for words in (
        "Memory in GiB",
        "640 tokens; first answer after",
        "the answer: ",
        "The candidate restriction at work",
    ):
        assert words in done.stdout
    ways = [line.split() for line in done.stdout.splitlines() if line.rstrip().endswith("OK")]
    assert len(ways) == 3
    assert len({tuple(way[-3:]) for way in ways}) == 1  # ids, logits, OK
    assert "DIFFERENT" not in done.stdout
    assert "</svg>" in (tmp_path / "timeline.svg").read_text()
    assert "<svg" in (tmp_path / "arena.html").read_text()
    assert cli.main(["trace", "timeline", str(tmp_path / "timeline.csv"), "--out", str(tmp_path / "again.svg")]) == 0
    assert (tmp_path / "again.svg").read_text() == (tmp_path / "timeline.svg").read_text()
    assert '"event": "end"' in (tmp_path / "serve.log").read_text()


@pytest.mark.usefixtures("hears_interrupts")
@pytest.mark.parametrize("phase", ["plan", "request"])  # in torch; over HTTP
def test_ctrl_c_in_the_show(checkpoint, tmp_path, phase):
    """The process crashed: the interpreter ended while the show's thread was inside torch."""
    change = WITHOUT_PLAN if phase == "request" else ""
    words = command(checkpoint, "--once", "--port", free_port(), "--out", tmp_path, change=change)
    wide = os.environ | {"COLUMNS": "120", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=wide) as process:
        assert process.stdout
        assert process.stderr
        if phase == "plan":
            log = tmp_path / "serve.log"
            while not (log.exists() and '"event": "start"' in log.read_text()):
                time.sleep(0.05)
        else:
            while not process.stdout.readline().startswith("2. "):
                pass
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "")
    assert "FAILED" not in out


def test_a_checkpoint_that_is_not_whole(checkpoint, tmp_path):
    """It ended without a word."""
    broken = shutil.copytree(checkpoint, tmp_path / "broken")
    shard = sorted(broken.glob("*.safetensors"))[0]
    os.truncate(shard, shard.stat().st_size - 1)
    done = demo(broken, "--once", "--port", free_port(), "--out", tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"demo: {broken}: checkpoint refused\n")


def test_wrong_input(checkpoint, tmp_path, capsys):
    assert cli.main(["demo", str(tmp_path / "nothing")]) == 2
    err = capsys.readouterr().err
    assert "demo:" in err
    assert "No such file or directory" in err
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        assert cli.main(["demo", str(checkpoint), "--once", "--port", port, "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.endswith("Address already in use; choose another with --port\n")


@pytest.mark.parametrize("port", ["0", "65536", "many"])
def test_a_port_that_the_client_would_not_find_is_refused(port, capsys):
    """The show waited for it for ever."""
    with pytest.raises(SystemExit) as refused:
        cli.main(["demo", "anywhere", "--port", port])
    assert refused.value.code == 2
    assert f"--port: {port}: must be a whole number from 1 to 65535" in capsys.readouterr().err
