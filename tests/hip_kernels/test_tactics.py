"""Forms of products: the same bits, the quickest of them measured, kept and never measured or overwritten again."""

import json
from contextlib import nullcontext

import pytest
import torch

from rocline.hip_kernels import tactics as tactics_file
from rocline.hip_kernels.driver import devices
from rocline.hip_kernels.linear import Fp8Weight
from rocline.hip_kernels.linear_hip import (
    FEW_TILES,
    Launched,
    Product,
    asked,
    forms,
    multiply_together,
    prepare_fp8_weight,
    use_forms,
    workspace_floats,
)
from rocline.hip_kernels.runtime import HipError
from rocline.hip_kernels.tactics import Measured, Tactics, graphs_ms, measure

SMALL = Launched("e4m3", ((1, 72, 2),))  # N and blocks of 32 channels
PAIR = Launched("e4m3", ((1, 40, 3), (1, 24, 3)))


@pytest.fixture(autouse=True)
def rules_again():
    yield
    use_forms({})


@pytest.fixture(autouse=True)
def few_sets(monkeypatch):
    monkeypatch.setattr(tactics_file, "ROTATED_BYTES", 1 << 16)


def weights(device, rng, of):
    for groups, n_out, n_blocks in of.shapes:
        codes = torch.from_numpy(rng.integers(0, 0x7F, (groups * n_out, n_blocks * 32))).to(torch.uint8)
        scales = torch.from_numpy(rng.integers(112, 122, (-(-groups * n_out // 32), n_blocks))).to(torch.uint8)
        yield prepare_fp8_weight(Fp8Weight(device.put(codes), device.put(scales)))


def test_forms_begin_with_the_rule():
    wide = Launched("e4m3", ((1, 5120, 256),))
    assert forms(SMALL, 1) == forms(PAIR, 16) == (1, FEW_TILES)
    assert forms(wide, 16) == (FEW_TILES, 1)
    assert forms(wide._replace(finishes=True), 16) == (FEW_TILES,)  # rounded and turned by lanes of 32 channels
    assert forms(SMALL, 17) == forms(wide, 65) == (2, 1)
    assert forms(wide, 4096) == (1,)


@pytest.mark.parametrize("of", [SMALL, PAIR])
@pytest.mark.parametrize("n_rows", [1, 5, 16, 17, 64, 65, 130])
def test_all_forms_give_the_same_bits_and_want_no_more_memory(device, rng, of, n_rows):
    tiles = list(weights(device, rng, of))
    x = device.put(torch.from_numpy(rng.standard_normal((n_rows, tiles[0].n_in))).bfloat16())
    may_be, found = forms(of, n_rows), []
    assert len(may_be) == 2
    most = workspace_floats(n_rows, *tiles)
    for form in may_be:
        use_forms({of.key(n_rows): form})
        assert workspace_floats(n_rows, *tiles) == (most if form == may_be[0] else 0)
        outs = [device.full((n_rows, each.n_out), float("nan"), torch.bfloat16) for each in tiles]
        room = device.full((max(1, workspace_floats(n_rows, *tiles)),), float("nan"))
        multiply_together("test", x, [Product(each, out) for each, out in zip(tiles, outs, strict=True)], room)
        found.append([device.get(out).view(torch.int16) for out in outs])
    for first, second in zip(*found, strict=True):
        assert torch.equal(first, second)


def test_a_form_that_cannot_be_is_passed_over(device, rng):
    (tiles,) = weights(device, rng, SMALL)
    use_forms({SMALL.key(70): 7})
    assert workspace_floats(70, tiles) > 0


def test_keys_are_of_row_counts_up_to_the_next_power_of_two():
    assert {SMALL.key(n) for n in (65, 100, 128)} == {"e4m3 1x72x2 rows 128"}
    assert PAIR.key(1) == "e4m3 1x40x3+1x24x3 rows 1"


def test_what_is_multiplied_can_be_asked(device, rng):
    (tiles,) = weights(device, rng, SMALL)
    x, out = (device.full((1, n), 0.0, torch.bfloat16) for n in (64, 72))
    with asked() as launched:
        multiply_together("test", x, [Product(tiles, out)])
    multiply_together("test", x, [Product(tiles, out)])
    assert list(launched) == [SMALL]


def clock(*ms):
    """A timer of one's own: ms of a launch in each form."""
    return lambda graphs: [of * graph.launches["e4m3_few", ""] for of, graph in zip(ms, graphs, strict=True)]


@pytest.mark.parametrize(("one", "two", "best"), [(3.0, 2.0, 2), (2.0, 3.0, 1), (2.0, 1.95, 1), (2.0, 1.9, 2)])
def test_the_quickest_is_taken_and_the_rule_where_little_is_gained(device, tmp_path, one, two, best):
    card, tactics = devices()[0], Tactics(tmp_path / "forms.json")
    held = card.memory().slab_bytes
    found = measure(card, [SMALL], [1], tactics, clock(one, two))
    assert found == {SMALL.key(1): Measured(best, {"1": 1e3 * one, "2": 1e3 * two})}
    assert card.memory().slab_bytes == held
    tactics.add(found)
    assert measure(card, [SMALL], [1], tactics, clock()) == {}


def test_times_of_a_graph(device, tmp_path):
    found = measure(devices()[0], [SMALL, PAIR], [1, 17], Tactics(tmp_path / "forms.json"), graphs_ms)
    assert found.keys() == {of.key(n) for of in (SMALL, PAIR) for n in (1, 17)}
    assert all(us > 0 for measured in found.values() for us in measured.us.values())


def test_small_weights_are_not_rotated_for_ever(device, tmp_path, monkeypatch):
    n_launches = []

    def timer(graphs):
        n_launches.extend(sum(graph.launches.values()) for graph in graphs)
        return [1.0] * len(graphs)

    for n_bytes in (1, 1 << 40):
        monkeypatch.setattr(tactics_file, "ROTATED_BYTES", n_bytes)
        measure(devices()[0], [SMALL], [1], Tactics(tmp_path / "forms.json"), timer)
    assert n_launches == [1, 1, 64, 64]


def test_what_finds_no_room_is_left_out(device, tmp_path, monkeypatch):
    monkeypatch.setattr(tactics_file, "SPARE_BYTES", 1 << 50)
    assert measure(devices()[0], [SMALL], [1], Tactics(tmp_path / "forms.json")) == {}
    monkeypatch.setattr(tactics_file, "SPARE_BYTES", 0)
    monkeypatch.setattr(tactics_file, "MOST_WEIGHT_BYTES", 1)
    assert measure(devices()[0], [SMALL], [1], Tactics(tmp_path / "forms.json")) == {}


@pytest.mark.parametrize(("name", "raises"), [("hipErrorOutOfMemory", False), ("hipErrorLaunchFailure", True)])
def test_room_that_others_take_meanwhile_stops_no_start(device, tmp_path, monkeypatch, caplog, name, raises):
    def taken(n_bytes):
        raise HipError(f"hipMalloc of {n_bytes} bytes", name)

    card = devices()[0]
    monkeypatch.setattr(card, "allocate", taken)
    with pytest.raises(HipError) if raises else nullcontext():
        assert measure(card, [SMALL], [1], Tactics(tmp_path / "forms.json")) == {}
    assert ("is not measured: hipMalloc of" in caplog.text) != raises


def test_a_later_phase_adds_and_overwrites_nothing(tmp_path):
    path = tmp_path / "new folder" / "forms.json"
    first, second = Tactics(path), Tactics(path)
    first.add({"a": Measured(1, {"1": 5.0})})
    second.add({"a": Measured(2, {"2": 4.0}), "b": Measured(2, {"2": 4.0})})  # another process, which had seen no file
    assert second.forms == {"a": 1, "b": 2}
    first.add({"c": Measured(1, {"1": 1.0})})
    assert first.forms == Tactics(path).forms == {"a": 1, "b": 2, "c": 1}
    assert json.loads(path.read_text())["b"] == {"form": 2, "us": {"2": 4.0}}


@pytest.mark.parametrize("text", ['{"a": {"form"', '{"a": {"form": "2", "us": {}}}', "[]", "\x00"])
def test_a_damaged_file_is_measured_anew(tmp_path, caplog, text):
    path = tmp_path / "forms.json"
    path.write_text(text)
    tactics = Tactics(path)
    assert tactics.forms == {}
    assert "it is passed over" in caplog.text
    tactics.add({"a": Measured(1, {})})
    assert Tactics(path).forms == {"a": 1}


def test_a_folder_that_cannot_be_written_costs_the_next_start_time(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    tactics = Tactics(tmp_path / "file" / "forms.json")
    tactics.add({"a": Measured(1, {})})
    assert tactics.forms == {"a": 1}
    assert "cannot keep what was measured" in caplog.text


def test_a_file_is_of_a_card_and_of_the_kernels(device, tmp_path, monkeypatch):
    card = devices()[0]
    path = Tactics.of(card, tmp_path).path
    assert path.parent == tmp_path
    assert path.name.startswith(f"tactics-{card.arch}-")
    monkeypatch.setattr(tactics_file, "texts_of", lambda source: {"linear.hip": b"another"})
    assert Tactics.of(card, tmp_path).path != path
