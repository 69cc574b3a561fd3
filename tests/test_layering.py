"""Imports run down only: tools -> http -> pipeline -> engine -> hip_kernels, arena.

Every import statement of the six folders is parsed, relative ones and those inside functions too, and so is
every importlib.import_module or __import__ of a literal name.
"""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAY_IMPORT = {
    "tools": {"tools", "http", "pipeline", "engine", "hip_kernels", "arena"},
    "http": {"http", "pipeline", "engine", "hip_kernels", "arena"},
    "pipeline": {"pipeline", "engine", "hip_kernels", "arena"},
    "engine": {"engine", "hip_kernels", "arena"},
    "hip_kernels": {"hip_kernels"},
    "arena": {"arena"},
}
# From the repository root these would import too, as second copies of the same modules. A bare `http` is the
# standard library's.
ROOT_FOLDERS = MAY_IMPORT.keys() - {"http"} | {"tests", "conftest"}


def imported_names(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of everything the module imports; `from a import b` gives a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [node.module] if node.module else []
            if node.level:
                parents = package.split(".")
                base = parents[: len(parents) - node.level + 1] + base
            yield from ((node.lineno, ".".join([*base, alias.name])) for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__"):
                yield node.lineno, str(node.args[0].value)


def violations(path: Path, source: str) -> list[str]:
    """What the file at this path (relative to the root) imports against the direction."""
    folder = path.parts[0]
    found = []
    for line, name in imported_names(ast.parse(source), ".".join(["rocline", *path.parent.parts])):
        top, _, rest = name.partition(".")
        target = rest.partition(".")[0]
        if top in ROOT_FOLDERS:
            found.append(f"{path}:{line}: imports {name}; write rocline.{name} (tests are never imported)")
        elif top == "rocline" and target not in MAY_IMPORT[folder]:
            allowed = ", ".join(sorted(MAY_IMPORT[folder]))
            found.append(f"{path}:{line}: {folder}/ imports {name}; it may import {allowed}")
    return found


def test_imports_run_down_only():
    files = [path for folder in MAY_IMPORT for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(files) > len(MAY_IMPORT)
    found = [v for path in files for v in violations(path.relative_to(ROOT), path.read_text("utf-8"))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("engine/a.py", "import rocline.pipeline"),  # up
        ("engine/a.py", "import os, rocline.tools.cli as cli"),
        ("engine/a.py", "from rocline.http import app"),
        ("engine/a.py", "from rocline import arena, pipeline"),  # one of two
        ("engine/a.py", "from rocline import *"),
        ("engine/a.py", "import rocline"),  # hides what it reaches
        ("engine/a.py", "from ..pipeline.plan import Plan"),
        ("engine/a.py", "from .. import pipeline"),
        ("engine/layers/a.py", "from ...http import app"),
        ("engine/layers/__init__.py", "from ...pipeline import plan"),
        ("engine/a.py", "def f():\n    from rocline.pipeline import plan"),
        ("engine/a.py", "if TYPE_CHECKING:\n    import rocline.pipeline.plan"),
        ("engine/a.py", "import importlib\nimportlib.import_module('rocline.pipeline')"),
        ("engine/a.py", "__import__('rocline.tools')"),
        ("pipeline/a.py", "from rocline.http.app import serve"),
        ("pipeline/a.py", "from rocline.tools import cli"),
        ("http/a.py", "from rocline.tools import cli"),
        ("http/a.py", "from ..tools import cli"),
        ("hip_kernels/a.py", "from rocline.arena import spans"),  # sideways
        ("arena/a.py", "from rocline.hip_kernels import driver"),
        ("arena/a.py", "from rocline.engine import config"),
        ("hip_kernels/a.py", "from ..engine.config import Config"),
        ("engine/a.py", "from engine.config import Config"),  # a second copy of the module
        ("tools/a.py", "import arena"),
        ("tools/a.py", "from tests.conftest import ROOT"),
        ("tools/a.py", "from rocline.kernels import x"),  # no such folder
    ],
)
def test_an_import_against_the_direction_is_found(path, source):
    assert len(violations(Path(path), source)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("tools/a.py", "import rocline.http.app\nfrom rocline import arena, engine\nfrom . import cli"),
        ("http/a.py", "import http.client\nfrom http import HTTPStatus\nfrom rocline.pipeline import engine"),
        ("pipeline/a.py", "from ..engine.config import Config\nfrom rocline.arena import spans"),
        ("engine/a.py", "from .layers import attention\nfrom rocline.hip_kernels import rms_norm"),
        ("engine/layers/a.py", "from ..config import Config\nfrom ...arena import spans\nfrom . import head"),
        ("engine/layers/__init__.py", "from .attention import attend\nfrom .. import config"),
        ("hip_kernels/a.py", "import torch\nfrom hip import hip\nfrom .driver import launch"),
        ("arena/a.py", "from .spans import Span\nimport importlib\nimportlib.import_module(name)"),
    ],
)
def test_an_import_down_is_not(path, source):
    assert violations(Path(path), source) == []


def test_http_never_gets_an_init():
    # With one, Python started in the root finds it in place of the standard library's http.
    assert not (ROOT / "http" / "__init__.py").exists()


def test_package_holds_exactly_the_folders():
    links = {path.name: path.readlink() for path in (ROOT / "rocline").iterdir() if path.is_symlink()}
    assert links == {folder: Path("..") / folder for folder in MAY_IMPORT}
    assert all((ROOT / folder).is_dir() for folder in MAY_IMPORT)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    build = project["tool"]["hatch"]["build"]
    assert build["targets"]["wheel"]["sources"] == {folder: f"rocline/{folder}" for folder in MAY_IMPORT}
    assert set(build["only-include"]) == {"rocline/__init__.py", "rocline/py.typed", *MAY_IMPORT}


def test_package_root_imports_nothing_of_ours():
    # arena and hip_kernels import it, so anything here would be theirs too.
    source = (ROOT / "rocline" / "__init__.py").read_text("utf-8")
    assert not [name for _, name in imported_names(ast.parse(source), "rocline") if name.startswith("rocline")]
