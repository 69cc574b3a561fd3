"""A stage's run: other sequences' steps inside it, rows that arrive in its memory, a house that changes around it."""

import subprocess
import sys
import threading

import pytest
import torch
from stage_paths import N_PAGES, PAGE, Path, random_path

from rocline.engine import scratch
from rocline.engine.handoff import HandOff, Reach, RowKind, RowSpan, bad_rows
from rocline.engine.layers.head import embed_rows, final_logits
from rocline.engine.model import Model
from rocline.engine.pages import Pages
from rocline.engine.routes import StageLayers


@pytest.fixture(scope="module")
def model(data_folder):
    return Model.load(data_folder / "micro" / "model", kv_tokens=N_PAGES * PAGE, page_positions=PAGE)


def whole(model) -> list[tuple[int, StageLayers]]:
    text = model.config.text_config
    return [(0, StageLayers(tuple(range(text.num_hidden_layers)), frozenset(text.kv_source_layer_ids)))]


def answers(model, ids, tokens) -> list[bytes]:
    """Logits after the prompt and after each token, from the serial model."""
    handle = model.open()
    out = [model.prefill(handle, ids)[-1].logits_f32] + [model.decode([(handle, t)]).logits_f32 for t in tokens]
    model.close(handle)
    return [logits.numpy().tobytes() for logits in out]


@pytest.mark.parametrize("n_visits", [1, 3])
def test_decode_steps_run_between_the_layers_of_a_chunk(model, rng, n_visits):
    """Inside each other on one stage, in all visits: both answers as if alone, and every span comes back."""
    path = Path(model, random_path(rng, model.config, 1, n_visits))
    prompt, other = (rng.integers(9, 500, n).tolist() for n in (100, 37))
    tokens = rng.integers(9, 500, 10).tolist()
    want = answers(model, other, tokens)
    path.open(0)
    path.open(1)
    got = [path.logits(path.run(path.begin(1, other, len(other))))]
    waiting = list(tokens)

    def step():
        for _ in range(min(len(waiting), rng.integers(1, 3))):
            got.append(path.logits(path.run(path.begin(1, [waiting.pop(0)]))))

    for start in range(0, len(prompt), 35):
        rows = path.run(path.begin(0, prompt[start : start + 35], len(prompt)), between=step)
        last = path.logits(rows)
    assert len(waiting) <= len(tokens) - 3  # once for each chunk at least
    while waiting:
        step()
    assert last == answers(model, prompt, [])[0]
    assert got == want
    assert path.used_bytes() == 0


def test_between_comes_once_for_each_pair_of_layers(model):
    path, seen = Path(model, whole(model)), []
    path.open(0)
    rows = path.begin(0, [9, 10, 11], 3)
    path.run(rows, between=lambda: seen.append("between"), record=lambda layer, name, x: seen.append(layer)).release()
    calls = [at for at, what in enumerate(seen) if what == "between"]
    assert [(max(x for x in seen[:at] if x != "between"), seen[at + 1]) for at in calls] == [
        (layer, layer + 1) for layer in range(model.config.text_config.num_hidden_layers - 1)
    ]


def test_what_between_raises_ends_the_run_and_nothing_else(model, rng):
    path = Path(model, whole(model))
    for sequence in (0, 1):
        path.open(sequence)
    prompt = rng.integers(9, 500, 30).tolist()

    def fail():
        raise KeyError("cancelled")

    with pytest.raises(KeyError, match="cancelled"):
        path.run(path.begin(0, prompt, 30), between=fail)
    assert path.used_bytes() == 0
    assert path.logits(path.run(path.begin(1, prompt, 30))) == answers(model, prompt, [])[0]


def test_rows_may_be_put_into_the_stage_by_the_caller(model, rng):
    """Embedded there, or copied by a transport that lets the sender go before the layers run."""
    prompt = rng.integers(9, 500, 40).tolist()
    want = answers(model, prompt, [])[0]
    path = Path(model, random_path(rng, model.config, 2, 3))
    path.open(0)
    span = path.begin(0, prompt, 40).spans
    rows, sent = None, []

    def arrive():
        if rows is None:
            return embed_rows(path.config, path.weights.embed_bf16, span, path.ids)
        copied = rows.copied()
        rows.release()
        sent.append(rows)
        return copied

    for device, visit in path.order:
        rows = path.stages[device].run(arrive, visit)
        assert rows.lease is not None
    assert len(sent) == len(path.order) - 1
    assert path.logits(rows) == want
    assert path.used_bytes() == 0


def test_the_last_rows_go_to_logits_in_the_stages_own_memory(model, rng):
    prompt = rng.integers(9, 500, 40).tolist()
    path = Path(model, whole(model))
    path.open(0)
    rows = path.run(path.begin(0, prompt, 40))
    memory, held = path.stages[0].memory, path.used_bytes()
    with scratch.use(memory), memory.scope():
        got = final_logits(path.config, path.weights.norm_bf16, path.weights.head_bf16, rows)
        assert path.used_bytes() - held >= got.logits_f32.nbytes
        assert got.rows == ((0, 39),)
        assert got.logits_f32.numpy().tobytes() == answers(model, prompt, [])[0]
    assert path.used_bytes() == held
    rows.release()
    assert path.used_bytes() == 0


def test_other_sequences_come_and_go_while_one_runs(model, rng):
    """Opened, given pages and closed by another thread, as the pipeline's scheduler does."""
    prompt = rng.integers(9, 500, 100).tolist()
    path, spare = Path(model, random_path(rng, model.config, 2, 3)), Pages(8, PAGE)
    stop, errors, turns = threading.Event(), [], 0

    def come_and_go():
        nonlocal turns
        try:
            while not stop.is_set():
                table: list[int] = []
                number = 10 + turns % 5
                for stage in path.stages.values():
                    stage.open(number, table)
                spare.grow([(table, 8 * PAGE)])
                for stage in path.stages.values():
                    assert stage.can_rewind(number, 0)
                    stage.close(number)
                spare.give_back(table)
                turns += 1
        except Exception as error:  # whatever it is, the test must hear of it
            errors.append(error)

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        for sequence in range(2):
            path.open(sequence)
            for start in range(0, len(prompt), 20):
                got = path.logits(path.run(path.begin(sequence, prompt[start : start + 20], len(prompt))))
            assert got == answers(model, prompt, [])[0]
    finally:
        stop.set()
        thread.join()
    assert not errors
    assert turns > 3


def hand_off(lengths, streams):
    reach = Reach(100, 16, 5, 2)
    spans = tuple(RowSpan(7 + number, 10 * number, n, RowKind.PREFILL, reach, 99) for number, n in enumerate(lengths))
    positions = torch.cat([torch.arange(span.start, span.end, dtype=torch.int32) for span in spans])
    return HandOff(spans, positions, positions[:, None], streams, torch.zeros(len(positions), 4))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_the_first_bad_row_of_each_span_is_found(rng, bad):
    lengths = [5, 0, 6, 4]
    streams = torch.from_numpy(rng.uniform(-1, 1, (15, 4, 32))).bfloat16() * torch.finfo(torch.bfloat16).max
    rows = hand_off(lengths, streams)
    assert streams.isfinite().all()
    assert bad_rows(rows) == []
    for row in (3, 4, 11):  # rows 3 and 4 of the first span, 0 of the last
        streams[row, rng.integers(4), rng.integers(32)] = bad
    assert bad_rows(rows) == [(7, 3), (10, 30)]


def test_rows_are_spent_when_neither_rows_nor_fresh_ones_are_left(model):
    path = Path(model, [(0, StageLayers((0, 1, 2, 3), frozenset({1, 2}))), (1, StageLayers((4,), frozenset()))])
    path.open(0)
    begun = path.begin(0, [9, 10], 200)
    assert not begun.is_spent
    first = path.stages[0].run(begun)  # far below the halo of its prompt
    assert first.n_rows == 0
    assert not first.is_spent  # layer 4, on the other device, reads source 2
    assert [fresh.source for fresh in first.fresh] == [2]
    second = path.stages[1].run(first)
    assert second.is_spent
    assert bad_rows(second) == []
    assert bool(path.stages[1].planes.keys_u8[2][path.tables[0][0], 1].any())


UNTOUCHED = """
import resource
from rocline.engine.pages import PagePlanes
from rocline.engine.release import release_config
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
planes = PagePlanes(release_config().text_config, {20}, n_pages=4096)
assert sum(plane.nbytes for plane in (*planes.rows_u8.values(), *planes.keys_u8.values())) > 2 << 30
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_pages_that_nobody_has_written_take_no_memory():
    """torch.zeros would write all of them."""
    done = subprocess.run([sys.executable, "-c", UNTOUCHED], capture_output=True, text=True, timeout=60, check=True)
    assert int(done.stdout) < 64 << 10  # KiB
