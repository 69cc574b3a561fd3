"""Fresh rows are mirrored once per device that reads them, wherever the visits lie (design.md section 6)."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stage_paths import N_PAGES, PAGE, Path, random_path

from rocline.engine.model import Model
from rocline.engine.release import release_config
from rocline.engine.routes import Route, StageLayers, routes

RELEASE = release_config()


def reads(config, visit):
    return {config.text_config.layers[layer].kv_source for layer in visit.layers} - {None}


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), n_devices=st.integers(1, 8), n_visits=st.integers(1, 16))
def test_every_device_gets_what_it_reads_once_and_nothing_travels_in_vain(seed, n_devices, n_visits):
    """Over cuts of the release, folded at random: rows are followed from visit to visit."""
    path = random_path(np.random.default_rng(seed), RELEASE, n_devices, n_visits)
    carried, held = set(), {device: set() for device, _ in path}
    found = routes(RELEASE, path)
    for (device, visit), route in zip(path, found, strict=True):
        carried |= visit.kv_sides
        assert route.stores <= carried
        assert visit.kv_sides <= route.stores
        assert not held[device] & route.stores
        held[device] |= route.stores
        assert reads(RELEASE, visit) <= held[device]
        carried &= route.forwards
        assert carried == route.forwards  # nothing is sent on that is not there
    assert not carried
    for at, route in enumerate(found):
        assert all(any(source in later.stores for later in found[at + 1 :]) for source in route.forwards)


def test_the_folded_release_on_two_cards():
    """Sources 2, 8, 14 and 20: the last one's side stands with layer 19, on the card that reads it not."""
    first, second = range(0, 12), range(12, 20)
    path = [
        (0, StageLayers(tuple(first), frozenset({2, 8}))),
        (1, StageLayers(tuple(second), frozenset({14, 20}))),
        (0, StageLayers(tuple(range(20, 40)), frozenset())),
    ]
    assert routes(RELEASE, path) == [
        Route(enters=frozenset(), stores=frozenset({2, 8}), forwards=frozenset({8})),
        Route(enters=frozenset({8}), stores=frozenset({8, 14, 20}), forwards=frozenset({20})),
        Route(enters=frozenset({20}), stores=frozenset({20}), forwards=frozenset()),
    ]


@pytest.mark.parametrize(
    ("sides", "message"),
    [
        ((frozenset({2, 8, 14}), frozenset()), r"visit 1, .*: reads source 20, which no visit up to it makes"),
        ((frozenset({2, 8, 14, 20}), frozenset({20})), r"visit 1, .*: the side of source 20 is made twice"),
    ],
)
def test_a_path_that_cannot_run_is_refused(sides, message):
    layers = tuple(range(20)), tuple(range(20, 40))
    with pytest.raises(ValueError, match=message):
        routes(RELEASE, [(0, StageLayers(*visit)) for visit in zip(layers, sides, strict=True)])


@pytest.fixture(scope="module")
def model(data_folder):
    return Model.load(data_folder / "micro" / "model", kv_tokens=N_PAGES * PAGE, page_positions=PAGE)


def test_every_device_has_the_bytes_of_the_serial_model(model, rng):
    """Any cut on any devices, a prompt in chunks and a decoded row: the same logits, planes and no memory left."""
    ids = rng.integers(9, 500, 2 * PAGE + 11).tolist()
    handle = model.open()
    last = model.prefill(handle, ids)[-1].logits_f32
    step = model.decode([(handle, 11)]).logits_f32
    want = [logits.numpy().tobytes() for logits in (last, step)]
    serial, n_layers = model.stages[0].planes, model.config.text_config.num_hidden_layers
    for n_visits in [2, 3, n_layers, n_layers]:
        layout = random_path(rng, model.config, int(rng.integers(1, 4)), n_visits)
        path = Path(model, layout)
        path.open(0)
        for start in range(0, len(ids), 75):
            rows = path.run(path.begin(0, ids[start : start + 75], len(ids)))
            got = path.logits(rows)
        assert [got, path.logits(path.run(path.begin(0, [11])))] == want, layout
        assert path.tables[0] == handle.page_table
        for device, stage in path.stages.items():
            own = set().union(*(reads(model.config, visit) | visit.kv_sides for visit in stage.visits))
            assert stage.planes.rows_u8.keys() == own, layout
            for source in own:
                for mine, theirs in ((stage.planes.rows_u8, serial.rows_u8), (stage.planes.keys_u8, serial.keys_u8)):
                    assert torch.equal(mine[source], theirs[source]), (layout, device, source)
        assert path.used_bytes() == 0
    model.close(handle)
