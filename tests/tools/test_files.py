"""What a command says of a file that it cannot read: one wording, whatever the command."""

import os

import pytest

from rocline.tools.files import FileError, explained, read_bytes, read_text, text_of


def test_text_and_bytes(tmp_path):
    (tmp_path / "text").write_bytes("Grüße\r\n".encode())
    assert read_text(tmp_path / "text") == "Grüße\r\n"
    assert read_bytes(str(tmp_path / "text")) == "Grüße\r\n".encode()


def test_each_fault_is_told_once(tmp_path):
    (tmp_path / "latin").write_bytes(b"na\xefve")
    for name, reason in (
        ("none", "No such file or directory"),
        (".", "Is a directory"),
        ("latin", "not UTF-8 at byte 2 (0xef); convert it, or name another file"),
    ):
        with pytest.raises(FileError) as refused:
            read_text(tmp_path / name)
        assert str(refused.value) == f"{tmp_path / name}: {reason}"
    with pytest.raises(FileError, match=r"^--prompt: not UTF-8 at byte 0 \(0xff\)"):
        text_of(b"\xff", "--prompt")


def test_errors_are_explained_without_numbers():
    assert explained(FileNotFoundError(2, os.strerror(2), "a")) == "a: No such file or directory"
    assert explained(OSError(28, "No space left on device")) == "No space left on device"
    assert explained(OSError(28, "No space left on device", "part"), "a") == "a: No space left on device"
    assert explained(OSError("stale")) == "stale"
    assert explained(ValueError("a: is empty")) == "a: is empty"
