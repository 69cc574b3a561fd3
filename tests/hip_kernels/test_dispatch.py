"""What stands in for which reference, with the same arguments; which kernels a model's shapes leave out."""

import importlib
import inspect
import pkgutil
from dataclasses import replace

import pytest
import torch

from rocline import hip_kernels
from rocline.hip_kernels.binding import operator, use_kernels
from rocline.hip_kernels.device_ops import KERNELS, PARTS
from rocline.hip_kernels.dispatch import DispatchError, Place, Shapes
from rocline.hip_kernels.driver import devices
from rocline.hip_kernels.prepare import PREPARE

RELEASE = Shapes(5120, 4, 64, 512, 64, 640, 384, 6, 129280, 32, 128, 8)


def operators():
    """Every function of the package that a kernel may stand in for, by name."""
    found = {}
    for info in pkgutil.iter_modules(hip_kernels.__path__):
        module = importlib.import_module(f"rocline.hip_kernels.{info.name}")
        for name, value in vars(module).items():
            if inspect.isfunction(value) and value.__module__ == module.__name__ and hasattr(value, "__wrapped__"):
                found[name] = value.__wrapped__
    return {name: reference for name, reference in found.items() if not inspect.isgeneratorfunction(reference)}


def test_every_operator_has_a_stand_in_and_the_reverse():
    assert KERNELS.keys() == operators().keys()
    assert PREPARE.keys() | PARTS.keys() <= KERNELS.keys()


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_a_stand_in_takes_the_arguments_of_its_reference(name):
    reference, kernel = (inspect.signature(f).parameters.values() for f in (operators()[name], KERNELS[name]))
    if any(p.kind is p.VAR_POSITIONAL for p in (*reference, *kernel)):
        return
    needed = [[p.name for p in side if p.default is p.empty] for side in (reference, kernel)]
    assert len(needed[0]) == len(needed[1])
    assert len(reference) <= len(kernel)


def test_a_thread_uses_kernels_while_told_to():
    calls = []

    @operator
    def probe(x: int) -> None:
        calls.append(("reference", x))

    probe(1)
    with use_kernels({"probe": lambda x: calls.append(("kernel", x))}):
        probe(2)
        with use_kernels({}):
            probe(3)
        probe(x=4)
    probe(5)
    assert calls == [("reference", 1), ("kernel", 2), ("reference", 3), ("kernel", 4), ("reference", 5)]


def test_the_release_runs_by_kernels_but_for_what_is_asked(device):
    place = Place(devices()[0], RELEASE)
    assert place.references == {}
    asked = Place(devices()[0], RELEASE, ["rope"])
    assert asked.references == {"rope": "as asked for"}
    assert not asked.has("rope")
    for name, parts in PARTS.items():  # a part's reference must be run as such
        assert asked.has(name) == ("rope" not in parts)
    for each in (place, asked):
        each.close()


@pytest.mark.parametrize(
    ("change", "left_out"),
    [
        ({"index_head_dim": 64}, {"index_key", "index_prepare", "index_query", "index_select", "index_select_among"}),
        ({"n_heads": 24}, {"attention"}),
        ({"list_slots": 641}, {"attention"}),
        ({"head_dim": 384}, {"window_row", "pool_pairs", "compressed_row", "attention"}),
        ({"n_streams": 2}, {"mhc_collapse_norm", "mhc_enter", "mhc_merge", "mhc_merge_enter", "engram_gate"}),
        ({"n_experts": 385}, {"router"}),
        ({"vocab": 131073}, {"sample"}),
    ],
)
def test_kernels_that_do_not_fit_are_left_out(device, change, left_out):
    place = Place(devices()[0], replace(RELEASE, **change))
    assert place.references.keys() == left_out
    place.close()


def test_an_operator_without_a_kernel_cannot_be_asked_for(device):
    with pytest.raises(DispatchError, match=r"reference operator 'rope_table'; there are act_round8, attend, att"):
        Place(devices()[0], RELEASE, ["rope_table"])


def test_a_weight_is_prepared_for_the_one_that_reads_it(device):
    weight = torch.ones(32, 64, dtype=torch.bfloat16)
    by_kernel, by_reference = Place(devices()[0], RELEASE), Place(devices()[0], RELEASE, ["head"])
    with by_kernel.stream:
        assert by_kernel.prepare("head", weight).n_out == 32
    with by_reference.stream:
        assert torch.equal(by_reference.prepare("head", weight).cpu(), weight)
    for each in (by_kernel, by_reference):
        each.close()
