"""Two settings put into rocline.toml: read back as meant, every other byte as it was, or a refusal."""

import os
import stat
import tomllib

import pytest

from rocline.tools import serve
from rocline.tools.tune_toml import TomlError, check_writable, edited, write

VALUES = {"chunk_rows": 512, "arena_gib": 2.5}
AT_THE_END = b"chunk_rows = 512\narena_gib = 2.5\n"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"", AT_THE_END),
        (b"port = 1", b"port = 1\n" + AT_THE_END),
        (b"# chunk_rows = 7\nport = 1\n", b"# chunk_rows = 7\nport = 1\n" + AT_THE_END),
        (b"chunk_rows = 7 # seven\n\narena_gib=3", b"chunk_rows = 512 # seven\n\narena_gib=2.5"),
        (b'  "chunk_rows"\t=  0x7  \narena_gib = 3e0\n', b'  "chunk_rows"\t=  512  \narena_gib = 2.5\n'),
        (b"'arena_gib'=1#one\n", b"'arena_gib'=2.5#one\nchunk_rows = 512\n"),
        (b"mixed_chunk_rows = 5\n", b"mixed_chunk_rows = 5\n" + AT_THE_END),
        (b"port = 1\r\nchunk_rows = 7\r\n", b"port = 1\r\nchunk_rows = 512\r\narena_gib = 2.5\r\n"),
        ("# Größe\n".encode(), "# Größe\n".encode() + AT_THE_END),
    ],
)
def test_the_rest_stays(before, after):
    assert edited(before, VALUES) == after


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b'x = """\nchunk_rows = 7\n"""\nchunk_rows = 8\n', "write `chunk_rows = 512` and `arena_gib = 2.5` yourself"),
        (b"[table]\nport = 1\n", "cannot be put there safely"),  # what comes at the end would be the table's
        (b'chunk_rows = "a b"\n', "cannot be put there safely"),
        (b"chunk_rows = [\n7]\n", "cannot be put there safely"),
        (b"chunk_rows = \n", "no valid TOML"),
        (b"\xff", "no valid TOML"),
    ],
)
def test_what_cannot_be_done_safely_is_refused(text, words):
    with pytest.raises(TomlError, match=r"TOML|safely") as refusal:
        edited(text, VALUES)
    assert words in str(refusal.value)


def test_any_file_of_settings_means_the_same_and_the_two(rng):
    lines = [
        *(b"", b"# a comment = 1", b"port = 8000 # chunk_rows", b'host = "::1"', b"aliases = ['a',\n  'b']"),
        *(b"any_model=true", b"  thinking = false", b"mixed_chunk_rows = 3", b"chunk_rows = 9", b"arena_gib=1.0 #x"),
    ]
    for _ in range(50):
        end = (b"\n", b"\r\n")[int(rng.integers(2))]
        chosen = [lines[n] for n in rng.permutation(len(lines))[: int(rng.integers(len(lines) + 1))]]
        text = end.join(chosen) + end * int(rng.integers(2))
        out = edited(text, VALUES)
        assert tomllib.loads(out.decode()) == tomllib.loads(text.decode()) | VALUES
        before, after = (
            [line for line in part.splitlines() if line[:9] not in (b"chunk_row", b"arena_gib")] for part in (text, out)
        )
        assert before == after


def test_a_server_reads_what_was_written(tmp_path, monkeypatch):
    monkeypatch.delenv("ROCLINE_CHUNK_ROWS", raising=False)
    path = tmp_path / "rocline.toml"
    path.write_bytes(b"running = 4\n")
    write(path, {"chunk_rows": 512, "arena_gib": 3})
    values = serve.configuration({"model": "m"}, {}, str(path))
    assert (values["chunk_rows"].value, values["arena_gib"].value, values["running"].value) == (512, 3.0, 4)
    assert isinstance(values["arena_gib"].value, float)


def test_a_new_file_can_be_read_by_others_and_an_old_one_keeps_its_mode(tmp_path):
    path = tmp_path / "rocline.toml"
    write(path, VALUES)
    assert path.read_bytes() == AT_THE_END
    path.chmod(0o640)
    write(path, {"chunk_rows": 1024})
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert path.read_bytes() == AT_THE_END.replace(b"512", b"1024")
    assert os.listdir(tmp_path) == ["rocline.toml"]


def test_a_link_stays_one(tmp_path):
    (tmp_path / "real.toml").write_bytes(b"port = 1\n")
    link = tmp_path / "rocline.toml"
    link.symlink_to("real.toml")
    write(link, VALUES)
    assert link.is_symlink()
    assert (tmp_path / "real.toml").read_bytes() == b"port = 1\n" + AT_THE_END


def test_a_refusal_leaves_the_file(tmp_path):
    path = tmp_path / "rocline.toml"
    path.write_bytes(b"[table]\n")
    for attempt in (check_writable, write):
        with pytest.raises(TomlError):
            attempt(path, VALUES)
    assert path.read_bytes() == b"[table]\n"
    assert os.listdir(tmp_path) == ["rocline.toml"]


@pytest.mark.parametrize("name", ["", "missing/rocline.toml"])
def test_where_nothing_can_be_written(tmp_path, name):
    with pytest.raises(OSError, match=r"directory"):
        check_writable(tmp_path / name, VALUES)
    assert os.listdir(tmp_path) == []
