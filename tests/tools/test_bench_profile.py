"""Time by kernel: what is made of a profiler's spans, the bounds of known work, and the lines of a profiled engine."""

import json
from contextlib import contextmanager

import pytest

from rocline.engine.config import ModelConfig
from rocline.engine.release import release_config
from rocline.pipeline.costs import CostModel
from rocline.tools import bench_engine, bench_profile, cli
from rocline.tools.bench_bounds import FAMILIES, Bounds, Ceilings
from rocline.tools.bench_profile import Copies, Idle, Kernel, Span, seen
from rocline.tools.kernel_budget import release_kernels

MS = 1_000_000
ONLY_PRODUCTS, ONLY_READING = Ceilings(float("inf"), 1.0), Ceilings(1.0, float("inf"))
# Beside kernels that read FP8 weights, in the same sources.
READ_NO_FP8 = ["bf16_", "prepare_", "linear_sum", "expert_sum", "engram_decode", "engram_gate"]
KERNELS = {"mixture_up": 1.0, "e4m3_128": 1.0, "attention": 1.0, "embed": 1.0}


def bounds(release, ceilings, add):
    """Least seconds by the family's name."""
    of = Bounds(release, ceilings)
    add(of)
    return {line["what"].partition(":")[0]: line["bound_ms"] / 1e3 for line in of.of(KERNELS)}


@pytest.fixture(scope="module")
def release():
    return release_config()


def test_overlapping_spans_are_busy_once():
    spans = [
        *(Span("a", 0, 10 * MS, 14 * MS), Span("b", 0, 12 * MS, 13 * MS), Span("a", 0, 13 * MS, 16 * MS)),
        *(Span("b", 0, 20 * MS, 21 * MS), Span("b", 1, 20 * MS, 26 * MS)),
    ]
    found = seen(reversed(spans))
    assert found.kernels == {"b": Kernel(8.0, 3), "a": Kernel(7.0, 2)}
    assert list(found.kernels) == ["b", "a"]
    assert (found.wall_ms, found.busy_ms, found.launches) == (16.0, 6.0 + 1.0 + 6.0, 5)
    assert found.idle == [Idle("a", "b", 4.0, 1)]  # after the last to end, not the last to begin; none across cards
    assert found.copies == {}
    assert seen([]) == ({}, 0.0, 0.0, [], {})


def test_idle_time_adds_up():
    ends = [0, 2, 3, 7, 7, 9, 20]
    spans = [Span("ab"[n % 2], 0, end * MS, (end + 1) * MS) for n, end in enumerate(ends)]
    found = seen([*spans, Span("long", 0, 10 * MS, 15 * MS), Span("within", 0, 11 * MS, 12 * MS)])
    assert found.busy_ms + sum(idle.ms for idle in found.idle) == found.wall_ms
    assert Idle("long", "a", 5.0, 1) in found.idle
    assert Idle("a", "b", 1.0 + 3.0 + 1.0, 3) in found.idle
    assert len(found.idle) == 2


def test_copies_are_hidden_by_what_their_own_card_computes():
    copy, back = "Memcpy PtoP (Device -> Device)", "Memcpy DtoH (Device -> Pinned)"
    spans = [
        *(Span("a", 0, 0, 4 * MS), Span("b", 0, 3 * MS, 5 * MS), Span("a", 0, 8 * MS, 9 * MS)),
        *(Span(copy, 0, 2 * MS, 10 * MS), Span(copy, 0, 20 * MS, 21 * MS), Span(back, 0, 4 * MS, 5 * MS)),
        *(Span(copy, 1, 2 * MS, 10 * MS), Span("a", 1, 0, 2 * MS), Span("a", 1, 10 * MS, 12 * MS)),
    ]
    found = seen(reversed(spans))
    assert found.copies == {copy: Copies(17.0, 3, 4.0), back: Copies(1.0, 1, 1.0)}


def test_a_decoded_row_reads_its_experts_and_all_other_fp8(release):
    """All that the cost model counts, but for what is not FP8 and what is not of a layer."""
    model = CostModel(release)
    found = bounds(release, ONLY_READING, lambda of: of.add_decode(1, 1))
    chosen = sum(cost.chosen_share * cost.expert_bytes for cost in model.layers)
    plain = sum(cost.read_bytes for cost in model.layers)
    assert found["experts"] > chosen
    assert found["products from FP8"] < plain
    assert found["experts"] + found["products from FP8"] == pytest.approx(chosen + plain, rel=0.03)
    assert bounds(release, ONLY_READING, lambda of: of.add_decode(1, 7)) == {
        name: pytest.approx(7 * seconds) for name, seconds in found.items()
    }


def test_all_kernels_that_read_fp8_weights_are_of_a_family():
    """Or their bytes would be counted and their time would not."""
    families = tuple(prefix for family in ("experts", "products from FP8") for prefix in FAMILIES[family])
    kernels = [kernel for kernel in release_kernels() if "WeightE4m3" in kernel.source.read_text()]
    assert {"e4m3_few", "mixture_up"} < {kernel.name for kernel in kernels}
    unknown = {kernel.name for kernel in kernels if not kernel.name.startswith((*families, *READ_NO_FP8))}
    assert not unknown


@pytest.mark.parametrize("chunk_rows", [1000, 4096])
def test_products_of_a_prefill_are_those_of_the_cost_model(release, chunk_rows):
    model, n_tokens = CostModel(release), 4096
    found = bounds(release, ONLY_PRODUCTS, lambda of: of.add_prefill(n_tokens, chunk_rows, "full"))
    assert set(found) == {"experts", "products from FP8", "attention"}
    whole = sum(cost.row_flops + cost.expert_row_flops for cost in model.layers)
    assert sum(found.values()) == pytest.approx(n_tokens * whole, rel=0.04)  # lists that are not full yet; the BF16


def test_a_halo_runs_half_of_the_layers(release):
    full, halo = (
        bounds(release, ONLY_PRODUCTS, lambda of, mode=mode: of.add_prefill(65_536, 8192, mode))
        for mode in ("full", "halo")
    )
    for family in full:
        assert 0.45 < halo[family] / full[family] < 0.55


def test_a_chunk_is_bound_by_the_slower_of_both(release):
    both = bounds(release, Ceilings(1.0, 1e4), lambda of: of.add_prefill(512, 512, "full"))
    for ceilings in (Ceilings(1.0, float("inf")), Ceilings(float("inf"), 1e4)):
        one = bounds(release, ceilings, lambda of: of.add_prefill(512, 512, "full"))
        assert all(seconds <= both[family] for family, seconds in one.items())


def test_the_lines(data_folder, monkeypatch, capsys):
    """Of an engine on the CPU, with a profiler that sees two steps of every layer."""
    model = data_folder / "micro" / "model"
    n_layers = ModelConfig.load(model).text_config.num_hidden_layers
    steps = [Span("mixture_down", 0, n * MS, (n + 1) * MS) for n in range(2 * n_layers)]

    @contextmanager
    def profiled():
        spans = []
        yield spans
        spans += [*steps, Span("embed", 0, 100 * MS, 101 * MS)]

    monkeypatch.setattr(bench_profile, "profiled", profiled)
    monkeypatch.setattr(bench_engine, "on_gpus", lambda options: True)
    monkeypatch.setattr(bench_engine, "devices", lambda: ["a card"])
    monkeypatch.setattr(Ceilings, "measured", lambda device: Ceilings(4e12, 7e14))
    settings = {"stages": 2, "context": 512, "kv_tokens": 8192}
    words = ["--model", str(model), "--profile", "--profile-tokens", "20", "--chunk-rows", "16,8"]
    words += [word for pair in settings.items() for word in ("--set", "{}={}".format(*pair))]
    requests = ["--decode", "1", "--decode-context", "5", "--output-tokens", "3", "--prefill", "30"]
    assert cli.main(["bench", "engine", *words, *requests]) == 0
    out, err = capsys.readouterr()
    ceilings, *lines = map(json.loads, out.splitlines())
    assert (ceilings["line"], ceilings["copy_bytes_s"], ceilings["bf16_flops_s"]) == ("ceilings", 4e12, 7e14)
    kinds = [line["line"] for line in lines if line["line"] != "rows"]
    one = ["profile", "kernel", "kernel", "idle", "bound"]
    timed = ["opened", "decode", "prefill"]
    assert kinds == [*timed, *timed, *one, *one, "hashes"]  # of the last size alone
    decode, down, embed, idle, bound = lines[kinds.index("profile") :][:5]
    assert (decode["profile"], decode["steps"]) == ("decode of 1, 5 tokens before", 2)
    assert (down["kernel"], down["launches"], down["mean_us"]) == ("mixture_down", 2 * n_layers, 1000)
    assert embed["share"] == pytest.approx(1 / (2 * n_layers + 1))
    assert (idle["after"], idle["before"], idle["times"]) == ("mixture_down", "embed", 1)
    assert idle["ms"] == 100 - 2 * n_layers
    assert bound["what"] == "experts: mixture_down"
    assert 0 < bound["of_bound"] < 1e-3
    assert "mixture_down" in err
