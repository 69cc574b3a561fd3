"""Cuts are whole, within their rules and as good as exhaustive search; the cost model is held to the published run."""

from collections.abc import Iterator
from itertools import pairwise
from math import inf
from pathlib import Path

import msgspec
import numpy as np
import pytest

from rocline.engine.config import ModelConfig
from rocline.engine.model import Model, split_layers
from rocline.engine.release import release_config
from rocline.pipeline.costs import CostModel, Rates, rows_in
from rocline.pipeline.forecast import (
    FORECAST_FLOPS,
    PUBLISHED,
    decode_rate,
    prefill,
    published_runs,
    reproduces_published,
    stage_shares,
)
from rocline.pipeline.placement import (
    CHOICE_RATES,
    HISTORIES,
    REQUEST_TOKENS,
    PlacedStage,
    Placement,
    PlacementError,
    Placer,
    equal_cut,
    layer_run,
)
from rocline.pipeline.simulate import CostTiming
from rocline.tools.demo_checkpoint import demo_config

MICRO = Path(__file__).parents[1] / "data" / "golden" / "micro" / "model"
CONFIGS = {
    "release": release_config(),
    "demo": msgspec.convert(demo_config(), ModelConfig),
    "micro": ModelConfig.load(MICRO),
}
MODELS = {name: CostModel(config) for name, config in CONFIGS.items()}
RELEASE = MODELS["release"]
MAX_LAYERS = 6  # of a stage, in these tests' idea of memory: the release on 48 GiB


def n_layers_of(visits):
    return sum(len(visit.layers) for visit in visits)


def placed(model, kind, n_stages, context, chunk_rows=2048, most=MAX_LAYERS):
    placer = Placer(model, kind, range(n_stages), n_layers_of, [most] * n_stages, context, chunk_rows)
    return placer, placer.choose()


def compositions(total: int, n_parts: int, least: int, most: int) -> Iterator[tuple[int, ...]]:
    """Every way to write total as n_parts numbers of least .. most."""
    if n_parts == 0:
        if total == 0:
            yield ()
        return
    for part in range(max(least, total - (n_parts - 1) * most), min(most, total - (n_parts - 1) * least) + 1):
        for rest in compositions(total - part, n_parts - 1, least, most):
            yield (part, *rest)


@pytest.mark.parametrize("kind", ["folded", "contiguous"])
@pytest.mark.parametrize("n_stages", range(1, 9))
@pytest.mark.parametrize("name", CONFIGS)
def test_every_cut_is_whole(name, n_stages, kind):
    model = MODELS[name]
    text = model.text
    if n_stages > model.n_layers:
        with pytest.raises(PlacementError, match=f"{n_stages} stages for {model.n_layers} layers"):
            placed(model, kind, n_stages, 4096, most=40)
        return
    _, placement = placed(model, kind, n_stages, min(text.max_position_embeddings, 65_536), most=40)
    assert [layer for _, visit in placement.path for layer in visit.layers] == list(range(model.n_layers))
    sides = [side for _, visit in placement.path for side in visit.kv_sides]
    assert sorted(sides) == list(text.kv_source_layer_ids)
    home = {source: source for source in text.kv_source_layer_ids}
    if text.layers[model.n_encoder].engram is None:
        home[model.n_encoder] -= 1  # the last source's side: with the layer before it
    for _, visit in placement.path:
        assert all(home[side] in visit.layers for side in visit.kv_sides)
        assert list(visit.layers) == list(range(visit.layers[0], visit.layers[-1] + 1))
    for half in (0, 1):  # a row goes through the stages from left to right, once or twice
        order = [stage for stage, visit in placement.path if (visit.layers[0] >= model.n_encoder) == half]
        assert order == sorted(order)
    owners = [len(set(stage.layers) & set(text.kv_source_layer_ids)) for stage in placement.stages]
    least_owners = -(-len(text.kv_source_layer_ids) // n_stages)
    if name != "micro" and kind == "folded" and 1 < n_stages < 6:
        # Layer 20 is on the first stage, and 4 layers a stage, or the fewest possible, bring layer 2 there as well.
        assert max(owners) <= least_owners + 1
    elif name != "micro":  # whose sources are next to each other
        assert max(owners) == least_owners
    if kind == "contiguous":
        assert all(len(stage.visits) == 1 for stage in placement.stages)


@pytest.mark.parametrize("n_stages", [5, 6, 7, 8])
@pytest.mark.parametrize("context", [4096, 261_933, 1_048_576])
def test_folded_stages_hold_layers_of_both_visits(n_stages, context):
    _, placement = placed(RELEASE, "folded", n_stages, context, most=8)
    for stage in placement.stages:
        encoder, decoder = stage.visits
        assert 1 <= len(encoder.layers) <= 4
        assert encoder.layers[-1] < 20 <= decoder.layers[0]
    assert placement.stages[-1].visits[0].kv_sides >= {20}
    assert 19 in placement.stages[-1].visits[0].layers


def test_the_engine_runs_a_placement(rng):
    """Visits are engine stages: the same logits, to the bit, as all layers in one."""
    _, placement = placed(MODELS["micro"], "folded", 3, 4096, most=5)
    ids = rng.integers(0, 512, size=90).tolist()
    logits = []
    for stages in (split_layers(CONFIGS["micro"], 1), [visit for _, visit in placement.path]):
        model = Model.load(MICRO, stages=stages, kv_tokens=4096)
        logits.append(model.prefill(model.open(), ids, chunk_rows=37)[-1].logits_f32)
    assert (logits[0] == logits[1]).all()


class Exhaustive:
    """The placer's objective over all folded cuts of the release, computed from the cost model once more."""

    def __init__(self, n_stages, context, chunk_rows=2048):
        self.n_stages, self.n_chunks = n_stages, -(-context // chunk_rows)
        histories = [context * (2 * at + 1) // (2 * HISTORIES) for at in range(HISTORIES)]
        step_s, middle = CHOICE_RATES.step_s, histories[HISTORIES // 2]

        def run_s(first, stop, n_rows, history):
            visit = layer_run(RELEASE.config, first, stop)
            return step_s + RELEASE.work_s(visit.layers, visit.kv_sides, lambda layer: n_rows, history, CHOICE_RATES)

        runs = [(first, stop) for first in range(40) for stop in range(first + 1, 41) if stop - first < 15]
        self.decode_s = {run: run_s(*run, 1, middle) for run in runs}
        self.encoder_s = {
            run: np.array([run_s(*run, chunk_rows, history) for history in histories]) for run in runs if run[1] <= 20
        }
        self.head_s = RELEASE.head.seconds(1, CHOICE_RATES)

    @staticmethod
    def runs(sizes, first):
        stops = np.cumsum(sizes) + first
        return list(zip([first, *stops[:-1].tolist()], stops.tolist(), strict=True))

    def best(self, below_s):
        """The least seconds of a request over every cut, or below_s; cuts whose encoder alone is more are no better."""
        decoder_sizes = np.array(list(compositions(20, self.n_stages, 1, MAX_LAYERS - 1)))
        stops = 20 + decoder_sizes.cumsum(1)
        table_s = np.zeros((41, 41))
        for (first, stop), seconds in self.decode_s.items():
            table_s[first, stop] = seconds
        decoder_s = table_s[stops - decoder_sizes, stops]
        decoder_s[:, -1] += self.head_s
        n_cuts = 0
        for sizes in compositions(20, self.n_stages, 1, max(4, -(-20 // self.n_stages))):
            runs = self.runs(sizes, 0)
            # Sources 2, 8, 14 and 20 on different stages; 20 is always on the first.
            owners = [sum(a <= owner < b for owner in (2, 8, 14)) + (at == 0) for at, (a, b) in enumerate(runs)]
            n_cuts += 1
            prefill_s = self.n_chunks * np.max([self.encoder_s[run] for run in runs], 0).sum() / HISTORIES
            if max(owners) > 1 or prefill_s >= below_s:
                continue
            fits = (decoder_sizes + np.array(sizes) <= MAX_LAYERS).all(1)
            if fits.any():
                token_s = (decoder_s[fits] + np.array([self.decode_s[run] for run in runs])).max(1).min()
                below_s = min(below_s, prefill_s + REQUEST_TOKENS * token_s)
        return below_s, n_cuts


@pytest.mark.parametrize(
    ("n_stages", "n_encoder_cuts"), [(7, 1554), (8, 8092)]
)  # the counts: nothing is left out of the search
@pytest.mark.parametrize("context", [261_933, 1_048_576])
def test_the_cut_is_the_best_of_all_cuts(n_stages, n_encoder_cuts, context):
    placer, placement = placed(RELEASE, "folded", n_stages, context)
    found_s = placer.request_s(placement)
    best_s, n_cuts = Exhaustive(n_stages, context).best(below_s=found_s)
    assert n_cuts == n_encoder_cuts
    assert found_s <= best_s * (1 + 1e-9)


@pytest.mark.parametrize("prompt_tokens", [65_536, 261_933, 1_000_411])
def test_no_encoder_cut_is_three_percent_faster_when_simulated(prompt_tokens):
    """What the objective leaves out, fill and every chunk's own history, changes little: all 8,092 cuts simulated."""
    chunk_rows, n_stages = 2048, 8
    starts = range(0, prompt_tokens - chunk_rows + 1, chunk_rows)
    histories = np.array(starts) + chunk_rows / 2
    cuts = np.array([(0, *np.cumsum(sizes)) for sizes in compositions(20, n_stages, 1, 4)])
    seconds = np.zeros((21, 21, 2))  # of a run: at the start, and for each position of history
    for first in range(20):
        for stop in range(first + 1, min(first + 4, 20) + 1):
            visit = layer_run(RELEASE.config, first, stop)
            at = [
                RELEASE.work_s(visit.layers, visit.kv_sides, lambda layer: chunk_rows, history, CHOICE_RATES)
                for history in (0, 1 << 20)
            ]
            seconds[first, stop] = at[0] + CHOICE_RATES.step_s, (at[1] - at[0]) / (1 << 20)
    of_cut = seconds[cuts[:, :-1], cuts[:, 1:]]  # [cut, stage, 2]
    done_s = np.zeros((n_stages, len(cuts)))  # when each stage is through with the chunk
    for history in histories:
        before_s = np.zeros(len(cuts))
        for stage in range(n_stages):
            before_s = np.maximum(done_s[stage], before_s) + of_cut[:, stage, 0] + history * of_cut[:, stage, 1]
            done_s[stage] = before_s
    _, placement = placed(RELEASE, "folded", n_stages, prompt_tokens)
    chosen = [0, *(stage.visits[0].layers[-1] + 1 for stage in placement.stages)]
    sources = [((cuts[:, :-1] <= s) & (s < cuts[:, 1:])) for s in (2, 8, 14)]
    owners = np.sum(sources, 0)
    owners[:, 0] += 1
    lawful = (owners <= 1).all(1)
    found_s = done_s[-1][(cuts == chosen).all(1)].item()
    assert found_s <= 1.03 * done_s[-1][lawful].min()


def test_products_are_counted_from_the_tensors():
    """Twice the active parameters: backbone.md sections 1 and 10, by hand."""
    attention = 5120 * 1280 + 1280 * 32768 + 5120 * 512 + 8192 * 4096 + 8192 * 5120
    mixture = 7 * 3 * 5120 * 2304 + 5120 * 384
    coefficients = 2 * 24 * 4 * 5120
    listed = (128 + 512) * 64 * 512 * 2
    reuse = RELEASE.layers[5]
    assert reuse.row_flops + reuse.expert_row_flops == 2 * (attention + mixture + coefficients + listed)
    assert RELEASE.score_flops(RELEASE.text.layers[8], 1000) == 2 * 32 * 128 * 500
    assert RELEASE.scored(RELEASE.text.layers[20], 1 << 20) == 1 << 20
    assert RELEASE.scored(RELEASE.text.layers[24], 1 << 20) == 16_384
    assert RELEASE.scored(RELEASE.text.layers[5], 1 << 20) == 0
    assert RELEASE.sides[20].row_flops == 2 * (512 * 5120 + 128 * 512)


def test_halo_rows_are_the_engine_s():
    """All rows in the encoder, 2,414 attention rows at layer 20, one at layer 39 (design.md section 5)."""
    reach = RELEASE.reach("halo", 100_000)
    rows = [sum(rows_in(reach, at, at + 1000)(layer) for at in range(0, 100_000, 1000)) for layer in range(40)]
    assert rows[:20] == [100_000] * 20
    assert rows[20] == 2414
    assert all(a - b == 127 for a, b in pairwise(rows[20:]))
    assert rows[39] == 1
    assert all(rows_in(RELEASE.reach("full", 100_000), 0, 1000)(layer) == 1000 for layer in range(40))


def test_a_step_reads_its_weights_at_least():
    rates = Rates(1e15, bytes_per_s=1e9)
    cost = RELEASE.layers[5]
    per_expert = cost.expert_bytes / 384
    assert cost.seconds(1, rates) == pytest.approx((cost.read_bytes + 6 * per_expert) / 1e9)
    assert cost.seconds(4096, rates) == pytest.approx((cost.read_bytes + cost.expert_bytes) / 1e9, rel=1e-6)


def test_the_published_run_is_reproduced():
    """Two rows: those of its chunk table are not at hand. The first fixes the busy rate, the second is predicted."""
    busy_flops, runs = published_runs()
    assert [(run.prompt_tokens, run.measured_rate) for run in runs] == list(PUBLISHED)
    assert all(abs(run.error) <= 0.15 for run in runs)
    assert reproduces_published()
    assert 7.1e12 < busy_flops < 12e12  # busy cards are faster than the mean over idle time too


def test_no_history_cost_lets_a_busy_card_have_the_published_mean():
    """At 7.1 TFLOP/s while busy the first row leaves its history so little that the second comes out too fast."""
    dense_s = (
        sum(RELEASE.layers[layer].row_flops + RELEASE.layers[layer].expert_row_flops for layer in range(5)) / 7.1e12
    )
    (short, short_rate), (long, long_rate) = PUBLISHED
    most_history_s = 1 / (0.85 * short_rate) - dense_s
    assert 1 / (dense_s + most_history_s * long / short) > 1.15 * long_rate


@pytest.mark.parametrize("flops_per_s", FORECAST_FLOPS)
@pytest.mark.parametrize(("prompt_tokens", "least"), [(261_933, 1.55), (1_000_411, 1.5)])
def test_folding_pays(prompt_tokens, least, flops_per_s):
    """Against five layers a card, modelled, chunk 2,048, the halo's tail included."""
    rates = Rates(flops_per_s)
    seconds = {
        kind: prefill(RELEASE, placed(RELEASE, kind, 8, prompt_tokens)[1], prompt_tokens, 2048, rates).total_s
        for kind in ("folded", "contiguous")
    }
    assert seconds["contiguous"] / seconds["folded"] >= least


def test_folding_pays_less_against_a_contiguous_cut_made_for_halo():
    """Six decoder layers a card leave four encoder layers to each of the others: nobody's default, and still slower."""
    bounds = [0, 4, 8, 12, 16, 22, 28, 34, 40]
    runs = [layer_run(RELEASE.config, first, stop) for first, stop in pairwise(bounds)]
    tuned = Placement("contiguous", tuple(PlacedStage(at, (run,)) for at, run in enumerate(runs)))
    for prompt_tokens, least in ((261_933, 1.3), (1_000_411, 1.35)):
        _, folded = placed(RELEASE, "folded", 8, prompt_tokens)
        slow, fast = (prefill(RELEASE, cut, prompt_tokens, 2048, CHOICE_RATES).total_s for cut in (tuned, folded))
        assert slow / fast >= least


def test_decode_is_bound_by_latency_then_by_the_busiest_card():
    placement = equal_cut(RELEASE.config, 8)
    timing = CostTiming(RELEASE, placement, CHOICE_RATES)
    steps_s = [timing.step_s(place, 1, 4096) for place in range(8)]
    alone = decode_rate(RELEASE, placement, 1, 1, CHOICE_RATES)
    assert alone == pytest.approx(1 / (sum(steps_s) + sum(timing.row_hop_s(place) for place in range(8))))
    eight = decode_rate(RELEASE, placement, 8, 8, CHOICE_RATES)
    assert alone < eight <= 1 / max(steps_s) * (1 + 1e-9)
    assert decode_rate(RELEASE, placement, 64, 8, CHOICE_RATES) > eight
    for n_groups in (0, 9):
        with pytest.raises(ValueError, match="must be 1 to 8"):
            decode_rate(RELEASE, placement, 8, n_groups, CHOICE_RATES)


def test_shares_add_up_and_show_idle_stages():
    _, folded = placed(RELEASE, "folded", 8, 261_933)
    for shares in stage_shares(RELEASE, folded, 261_933, 2048, CHOICE_RATES):
        assert sum(shares) == pytest.approx(1)
        assert min(shares) > 0.02
    prefill_shares, _ = stage_shares(RELEASE, equal_cut(RELEASE.config, 8), 261_933, 2048, CHOICE_RATES)
    assert max(prefill_shares[4:]) < 0.02  # what folding is for


def test_nothing_fits_is_none_and_the_roomiest_cut_is_still_known():
    placer, placement = placed(RELEASE, "folded", 8, 65_536, most=4)
    assert placement is None
    assert max(n_layers_of(stage.visits) for stage in placer.roomiest().stages) == 5
    assert placer.request_s(placer.roomiest()) < inf
