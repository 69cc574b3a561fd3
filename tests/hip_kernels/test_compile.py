"""Run-time compilation and its disk cache: nothing stale, nothing half-written, nothing compiled twice."""

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from rocline.hip_kernels import compile as compile_module
from rocline.hip_kernels.compile import CompileError, Compiler, Request, compile_text, texts_of
from rocline.hip_kernels.driver import devices


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "scale.hip"
    path.write_text('#include "port.hip.h"\n  #  include "scale.hip.h"\nRL_KERNEL(1) scale() {}\nRL_EXPORT(scale)\n')
    (tmp_path / "scale.hip.h").write_text("// shared\n")
    return path


@pytest.fixture
def compiled(device, monkeypatch):
    """Stands for hiprtc: the list of what was compiled; code is its number and its sources."""
    calls = []

    def fake(request, texts):
        calls.append(str(request))
        return f"{len(calls)} {request}".encode() + b"\0" * 100

    monkeypatch.setattr(compile_module, "compile_text", fake)
    return calls


def request(source, arch="gfx1100", **defines):
    return Request(source, tuple(sorted(defines.items())), arch)


def entry_of(folder):
    (path,) = folder.iterdir()
    return path


def test_a_source_brings_what_it_includes(source):
    texts = texts_of(source)
    assert list(texts) == ["scale.hip", "port.hip.h", "scale.hip.h"]
    (source.parent / "scale.hip.h").write_text('#include "absent.hip.h"\n')
    with pytest.raises(CompileError, match=r"scale.hip: absent.hip.h is neither in"):
        texts_of(source)


def test_the_second_time_comes_from_disk(source, compiled, tmp_path):
    first = Compiler(tmp_path / "cache")
    code = first.code_object(request(source))
    assert first.code_object(request(source)) == code
    again = Compiler(tmp_path / "cache")
    assert again.code_object(request(source)) == code
    assert (first.n_compiled, again.n_compiled, len(compiled)) == (1, 0, 1)


def test_the_key_holds_everything_that_matters(source, compiled, tmp_path, monkeypatch):
    compiler = Compiler(tmp_path / "cache")

    def compiles(asked):
        before = len(compiled)
        compiler.code_object(asked)
        return len(compiled) - before

    assert compiles(request(source)) == 1
    assert compiles(request(source, arch="gfx1101")) == 1
    assert compiles(request(source, DIM=1)) == 1
    assert compiles(request(source, DIM=2)) == 1
    assert compiles(request(source, DIM=2)) == 0
    source.write_text(source.read_text() + "// changed\n")
    assert compiles(request(source)) == 1
    (source.parent / "scale.hip.h").write_text("// changed\n")
    assert compiles(request(source)) == 1
    (source.parent / "unrelated.hip.h").write_text("// not included\n")
    assert compiles(request(source)) == 0
    monkeypatch.setattr(compile_module, "compiler_version", lambda: "another")
    assert compiles(request(source)) == 1
    monkeypatch.setattr(compile_module, "OPTIONS", ("-O1",))
    assert compiles(request(source)) == 1


@pytest.mark.parametrize(
    "spoil",
    [
        lambda whole: b"",
        lambda whole: whole[:-1],
        lambda whole: whole + b"\0",
        lambda whole: whole[:-50] + b"\1" + whole[-49:],
        lambda whole: whole[:30] + bytes([whole[30] ^ 1]) + whole[31:],
        lambda whole: b"something else of the same name",
    ],
)
def test_a_corrupt_entry_is_rebuilt(source, compiled, tmp_path, spoil):
    folder = tmp_path / "cache"
    Compiler(folder).code_object(request(source))
    path = entry_of(folder)
    path.write_bytes(spoil(path.read_bytes()))
    compiler = Compiler(folder)
    rebuilt = compiler.code_object(request(source))
    assert rebuilt.startswith(b"2 ")
    assert Compiler(folder).code_object(request(source)) == rebuilt  # and stored whole
    assert len(compiled) == 2


def test_an_entry_of_another_key_is_rebuilt(source, compiled, tmp_path):
    """Whole in itself, but under the wrong name: copied by hand, say."""
    other, folder = tmp_path / "other", tmp_path / "cache"
    Compiler(other).code_object(request(source, DIM=1))
    Compiler(folder).code_object(request(source, DIM=2))
    entry_of(folder).write_bytes(entry_of(other).read_bytes())
    assert b"DIM=2" in Compiler(folder).code_object(request(source, DIM=2))
    assert len(compiled) == 3


def test_nothing_half_written_is_left(source, compiled, tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setattr(compile_module.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    assert Compiler(folder).code_object(request(source)).startswith(b"1 ")  # a disk that fails costs only the cache
    assert list(folder.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_only_logged(source, compiled, tmp_path, caplog):
    (tmp_path / "file").touch()
    assert Compiler(tmp_path / "file" / "cache").code_object(request(source))
    assert "cannot keep compiled" in caplog.text


def test_one_key_asked_for_at_once_compiles_once(source, device, tmp_path, monkeypatch):
    n_calls = 0

    def slow(request, texts):
        nonlocal n_calls
        n_calls += 1
        time.sleep(0.05)
        return b"code"

    monkeypatch.setattr(compile_module, "compile_text", slow)
    compiler = Compiler(tmp_path / "cache")
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(compiler.code_object, [request(source)] * 8)) == {b"code"}
    assert n_calls == 1


def test_prepare_compiles_side_by_side_and_reports_progress(source, device, tmp_path, monkeypatch):
    together = threading.Barrier(2, timeout=20)  # passes only if two compilations run at once
    monkeypatch.setattr(compile_module.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(compile_module, "compile_text", lambda *_: b"%d" % together.wait())
    seen = []
    compiler = Compiler(tmp_path / "cache")
    wanted = [request(source, DIM=i) for i in range(4)]
    compiler.prepare([*wanted, wanted[0]], lambda done, of, what: seen.append((done, of, what)))
    assert [(done, of) for done, of, _ in seen] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert sorted(what for _, _, what in seen) == [f"scale.hip DIM={i} gfx1100" for i in range(4)]
    assert compiler.n_compiled == 4


def test_prepare_passes_the_first_error_on(source, device, tmp_path, monkeypatch):
    def failing(request, texts):
        raise CompileError(f"{request} does not compile")

    monkeypatch.setattr(compile_module, "compile_text", failing)
    with pytest.raises(CompileError, match=r"scale.hip DIM=. gfx1100 does not compile"):
        Compiler(tmp_path / "cache").prepare(request(source, DIM=i) for i in range(3))


def test_compiling_after_the_seal_is_counted_and_logged(source, compiled, tmp_path, caplog):
    compiler = Compiler(tmp_path / "cache")
    compiler.code_object(request(source, DIM=1))
    compiler.seal()
    with caplog.at_level(logging.WARNING):
        compiler.code_object(request(source, DIM=1))
        assert (compiler.n_late, caplog.text) == (0, "")
        compiler.code_object(request(source, DIM=2))
    assert (compiler.n_compiled, compiler.n_late) == (2, 1)
    assert "compiling scale.hip DIM=2 gfx1100 after the start" in caplog.text


def test_the_real_compiler(source, device):
    arch = devices()[0].arch
    assert compile_text(request(source, arch), texts_of(source))
    source.write_text('#include "port.hip.h"\nRL_KERNEL(1) scale() { undeclared = DIM; }\n')
    with pytest.raises(CompileError, match=rf"scale.hip DIM=3 {arch} does not compile(?s:.*)undeclared"):
        compile_text(request(source, arch, DIM=3), texts_of(source))
