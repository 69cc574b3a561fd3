"""How the runtime is told that there is none."""

import sys
from types import ModuleType

import pytest

from rocline.hip_kernels import runtime
from rocline.hip_kernels.runtime import HipError


def test_the_missing_library_is_named_plainly(monkeypatch):
    """hip-python's own words show the name as Python shows bytes."""

    def no_library():
        raise RuntimeError("failed to dlopen 'b'libamdhip64.so'': libamdhip64.so: cannot open shared object file")

    package, module = ModuleType("hip"), ModuleType("hip.hip")
    package.hip, module.hipGetDeviceCount = module, no_library
    monkeypatch.setitem(sys.modules, "hip", package)
    with pytest.raises(HipError, match=r"no runtime library \(failed to dlopen 'libamdhip64.so': lib"):
        runtime.hip.__wrapped__()
