"""Files that a command is told of, and what is wrong with them in one wording: `FILE: No such file or directory`."""

from __future__ import annotations

from pathlib import Path


class FileError(ValueError):
    """A file that cannot be read, or is not text; the message says which and why."""


def explained(error: Exception, file: str | Path | None = None) -> str:
    """Of an OSError the file and the reason, each once and without a number; of another error its message.

    file: where the error may name another file, or none
    """
    if not isinstance(error, OSError):
        return str(error)
    named, reason = file or error.filename, error.strerror or str(error)
    return f"{named}: {reason}" if named else reason


def read_bytes(file: str | Path) -> bytes:
    """Raises FileError."""
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise FileError(explained(error, file)) from error


def read_text(file: str | Path) -> str:
    """Raises FileError, for what is not UTF-8 too."""
    return text_of(read_bytes(file), file)


def text_of(data: bytes, source: str | Path) -> str:
    """`data` as text. source: what to call it. Raises FileError."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FileError(
            f"{source}: not UTF-8 at byte {error.start} (0x{data[error.start]:02x}); convert it, or name another file"
        ) from error
