"""`rocline demo`, shortened: the whole show with a real client over a real server, and wrong input."""

import os
import socket
import subprocess
import sys

import pytest

from rocline.tools import cli
from rocline.tools.demo_checkpoint import write_demo_checkpoint

# A shorter document, still past the 512 candidate positions.
SHORT = "from rocline.tools import cli, demo; demo.TOKENS = 640; demo.CANDIDATE_TOKENS = 600; "
RUN = "import sys; sys.exit(cli.main(sys.argv[1:]))"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    write_demo_checkpoint(folder, seed=0)
    return folder


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def demo(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", SHORT + RUN, "demo", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=400, env=os.environ | {"COLUMNS": "120"})


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
    assert '"event": "end"' in (tmp_path / "serve.log").read_text()


def test_wrong_input(checkpoint, tmp_path):
    done = demo(tmp_path / "nothing")
    assert done.returncode == 2
    assert "demo:" in done.stderr
    assert "No such file or directory" in done.stderr
    with socket.create_server(("127.0.0.1", 0)) as listener:
        done = demo(checkpoint, "--once", "--port", listener.getsockname()[1], "--out", tmp_path)
    assert done.returncode == 2
    assert "Address already in use" in done.stdout
    assert "choose another with --port" in done.stdout


@pytest.mark.parametrize("port", ["0", "65536", "many"])
def test_a_port_that_the_client_would_not_find_is_refused(port, capsys):
    """The show waited for it for ever."""
    with pytest.raises(SystemExit) as refused:
        cli.main(["demo", "anywhere", "--port", port])
    assert refused.value.code == 2
    assert f"--port: {port}: must be 1 to 65535" in capsys.readouterr().err or port == "many"
