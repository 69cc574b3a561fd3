"""Two settings put into rocline.toml, every other byte left as it is."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

Values = Mapping[str, int | float]


class TomlError(ValueError):
    """The file cannot be changed without a risk for the rest of it."""


def edited(text: bytes, values: Values) -> bytes:
    """`text` with `name = value` for each of values: in place where the name stands alone on a line, else at the end.

    The result is parsed: it says the same as before and these values, or TomlError is raised.
    """
    try:
        before = tomllib.loads(text.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise TomlError(f"no valid TOML: {error}") from error
    out = text
    for name, value in values.items():
        out = _put(out, name, value, is_there=name in before)
    try:
        after = tomllib.loads(out.decode())
    except tomllib.TOMLDecodeError:
        after = {}
    if after != before | dict(values):
        lines = " and ".join(f"`{name} = {_toml(value)}`" for name, value in values.items())
        raise TomlError(
            f"{', '.join(values)} cannot be put there safely; write {lines} yourself, on lines of their own"
        )
    return out


def _put(text: bytes, name: str, value: int | float, is_there: bool) -> bytes:
    key = rb"""[ \t]*(?:%(name)s|"%(name)s"|'%(name)s')[ \t]*=[ \t]*""" % {b"name": name.encode()}
    line = re.compile(rb"^(%s)[^\s#]+([ \t]*(?:#[^\r\n]*)?)(?=\r?$)" % key, re.MULTILINE)
    new = _toml(value).encode()
    if is_there:
        return line.sub(lambda found: found[1] + new + found[2], text)
    end = b"\r\n" if b"\r\n" in text else b"\n"
    joint = end if text and not text.endswith(b"\n") else b""
    return text + joint + name.encode() + b" = " + new + end


def _toml(value: int | float) -> str:
    return repr(value)


def check_writable(path: Path, values: Values) -> None:
    """Raises TomlError and OSError where write() would."""
    edited(_text(path), values)
    target = path.resolve()
    if target.exists() and not os.access(target, os.W_OK):
        raise PermissionError(13, os.strerror(13), str(path))
    tempfile.TemporaryFile(dir=target.parent).close()


def write(path: Path, values: Values) -> None:
    """Raises TomlError and OSError; the file is then as it was, and never half written."""
    target, text = path.resolve(), edited(_text(path), values)
    number, name = tempfile.mkstemp(dir=target.parent, prefix=target.name)
    try:
        with os.fdopen(number, "wb") as file:
            file.write(text)
        if target.exists():
            shutil.copymode(target, name)
        else:
            os.chmod(name, 0o644)
        os.replace(name, target)
    except OSError:
        with suppress(OSError):
            os.unlink(name)
        raise


def _text(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
