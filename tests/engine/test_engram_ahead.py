"""Engram rows gathered ahead: the same bits as a layer's own gather, however hand-offs come, fail or are given up."""

import threading
import time
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from stage_paths import PAGE, Path, random_path

from rocline.engine import engram_ahead, scratch
from rocline.engine.engram import EngramTable
from rocline.engine.engram_ahead import PIECE_ROWS, EngramAhead, EngramAheadError, TableRows
from rocline.engine.handoff import HandOff, Reach, RowKind, RowSpan
from rocline.engine.home import HipHome
from rocline.engine.model import Model
from rocline.engine.ngrams import ngram_tables
from rocline.engine.release import release_config
from rocline.hip_kernels.driver import Event, HostBuffer
from rocline.hip_kernels.engram import engram_decode, engram_gather
from rocline.tools.demo_checkpoint import write_demo_checkpoint

VOCAB, N_COLUMNS = 1000, 6
WAIT_S = 10  # more than any wait here that works


@pytest.fixture
def tables(rng) -> dict[int, EngramTable]:
    """Two layers' tables of random bytes, of codes 64 wide."""
    out = {}
    for ngrams in ngram_tables([1, 14], 4, N_COLUMNS // 3, 500, VOCAB):
        codes, scales = (
            torch.from_numpy(rng.integers(0, high, (ngrams.n_rows, n), dtype=np.uint8))
            for high, n in ((120, 64), (140, 2))
        )
        id_map = rng.permutation(VOCAB).astype(np.int32)
        out[ngrams.layer] = EngramTable.build(ngrams, codes, scales, id_map, pad_token=2)
    return out


@pytest.fixture
def ahead(tables):
    ahead = EngramAhead(tables)
    yield ahead
    ahead.close()


def lookbacks(rng, n_rows):
    return torch.from_numpy(rng.integers(-1, VOCAB, (n_rows, 4), dtype=np.int32))


def check_taken(table, lookback, taken):
    """What was taken is what the layer's own hash and gather find, to the value."""
    rows = torch.empty((len(lookback), N_COLUMNS), dtype=torch.int64)
    table.hash_rows(lookback, rows)
    assert torch.equal(taken.rows_i64, rows)
    own, ours = (torch.empty((len(lookback), N_COLUMNS * 64), dtype=torch.bfloat16) for _ in range(2))
    engram_gather(rows, table.codes_e4m3, table.scales_e8m0, own)
    engram_decode(taken.codes_e4m3.flatten(0, 1), taken.scales_e8m0.flatten(0, 1), ours.view(-1, 64))
    assert torch.equal(own.view(torch.int16), ours.view(torch.int16))


def test_work_begun_inside_a_stages_run(ahead, tables, rng):
    """A stage's run is in inference mode, and its decode steps begin the next ones: buffers go both ways."""
    for inside in (True, False, True):
        lookback = lookbacks(rng, 20)
        with torch.inference_mode(inside):
            gathered = ahead.start(lookback)
        for layer, table in tables.items():
            check_taken(table, lookback, gathered.take(layer))
        gathered.release()


@pytest.mark.parametrize("n_rows", [0, 1, PIECE_ROWS - 1, PIECE_ROWS, PIECE_ROWS + 1, 5 * PIECE_ROWS + 3])
def test_the_rows_are_those_a_layer_would_gather(tables, ahead, rng, n_rows):
    lookback = lookbacks(rng, n_rows)
    gathered = ahead.start(lookback)
    for layer, table in tables.items():
        check_taken(table, lookback, gathered.take(layer))
    gathered.release()
    assert ahead.n_lent == 0


def test_the_caller_may_overwrite_what_it_gave(tables, ahead, rng):
    lookback = lookbacks(rng, 500)
    kept = lookback.clone()
    gathered = ahead.start(lookback)
    lookback.fill_(-1)
    check_taken(tables[1], kept, gathered.take(1))
    gathered.release()


def test_a_hand_off_that_drops_rows_takes_those_it_has(tables, ahead, rng):
    lookback, reach = lookbacks(rng, 9), Reach(100, 16, 5, 2)
    spans = tuple(RowSpan(n, 10 * n, size, RowKind.PREFILL, reach, 99) for n, size in enumerate((4, 5)))
    streams = torch.zeros((9, 4, 2), dtype=torch.bfloat16)
    rows = HandOff(spans, lookback[:, 0], lookback, streams, torch.zeros(9, 4), engram=ahead.start(lookback))
    assert rows.from_floors([0, 0]).engram is rows.engram
    for floors in ([2, 11], [3, 13], [9, 99]):
        rows = rows.from_floors(floors).copied()
        check_taken(tables[14], rows.lookback_i32, rows.engram.take(14))
    assert rows.n_rows == 0
    rows.engram.release()
    assert ahead.n_lent == 0


def test_buffers_are_used_again(ahead, rng):
    def places(n_rows):
        gathered = ahead.start(lookbacks(rng, n_rows))
        taken = {tensor.data_ptr() for layer in (1, 14) for tensor in gathered.take(layer)}
        return gathered, taken

    first, there = places(300)
    second, elsewhere = places(300)
    assert not there & elsewhere
    first.release()
    first.release()
    third, again = places(260)  # of the same capacity
    assert again == there
    second.release()
    third.release()
    assert ahead.n_lent == 0


class SlowTable(EngramTable):
    """Waits for `go` before it copies rows, and says which hand-off (by its first token) they are of."""

    def hash_rows(self, lookback_i32, rows_i64):
        self.__dict__["seen"].append(int(lookback_i32[0, 0]))
        assert self.__dict__["go"].wait(WAIT_S)
        super().hash_rows(lookback_i32, rows_i64)


@pytest.fixture
def slow(tables):
    """(an EngramAhead of one thread and one layer, what that waits for, what it has begun)."""
    table = SlowTable(*(getattr(tables[1], name) for name in tables[1].__dataclass_fields__))
    go, seen = threading.Event(), []
    table.__dict__.update(go=go, seen=seen)
    ahead = EngramAhead({1: table}, n_threads=1)
    yield ahead, go, seen
    go.set()
    ahead.close()


@pytest.fixture
def pinned(hip_device, monkeypatch) -> list[int]:
    """Bytes of each buffer that is pinned."""
    sizes = []

    class Counted(HostBuffer):
        def __init__(self, n_bytes):
            super().__init__(n_bytes)
            sizes.append(n_bytes)

        def free(self):
            super().free()
            sizes.remove(self.n_bytes)

    monkeypatch.setattr(engram_ahead, "HostBuffer", Counted)
    return sizes


@contextmanager
def on_a_card():
    """Meanwhile this thread's tensors are a device's, as a stage's are."""
    home = HipHome(release_config().text_config)
    memory = home.memory(1 << 20, "a stage")
    with torch.inference_mode(), scratch.use(memory), memory.scope():
        yield home.place.device


def test_pinned_rows_go_to_a_card_as_they_lie(tables, rng, pinned):
    lookback, taken = lookbacks(rng, 20), []
    ahead = EngramAhead(tables, is_pinned=True)
    ahead.prepare(20, 2)
    assert len(pinned) == 2 * 4  # codes and scales of two layers
    gathered = ahead.start(lookback)
    with on_a_card() as device:
        for rows, index in ((gathered, range(20)), (gathered.pick(torch.tensor([3, 3, 19])), [3, 3, 19])):
            for layer in tables:
                rows_i64, *brought = rows.take(layer)
                assert {tensor.device for tensor in brought} == {device.torch_device}
                taken.append((layer, lookback[list(index)], TableRows(rows_i64, *map(scratch.fetch, brought))))
    for layer, of_lookback, rows in taken:
        check_taken(tables[layer], of_lookback, rows)
    gathered.release()
    assert len(pinned) == 2 * 4
    ahead.close()
    assert pinned == []


def test_rows_on_their_way_to_a_card_are_not_overwritten(tables, rng, pinned, monkeypatch):
    ahead = EngramAhead(tables, is_pinned=True)
    with on_a_card():
        first = buffer_of(ahead, lookbacks(rng, 20))
        assert buffer_of(ahead, lookbacks(rng, 20)) == first
        with monkeypatch.context() as patch:
            patch.setattr(Event, "done", lambda event: False)
            patch.setattr(engram_ahead, "SETTLE_S", 0.01)
            assert buffer_of(ahead, lookbacks(rng, 20)) != first
            ahead.close()
            assert len(pinned) == 2 * 4  # a card that hangs may read them yet
        ahead.close()
    assert pinned == []


def buffer_of(ahead, lookback):
    """Where a hand-off's rows lay that have been taken and released."""
    gathered = ahead.start(lookback)
    gathered.take(1)
    gathered.take(14)
    place = gathered.on_host(1).codes_e4m3.data_ptr()
    gathered.release()
    return place


def of(token, n_rows):
    return torch.full((n_rows, 4), token, dtype=torch.int32)


def until(condition):
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(1e-3)


def test_a_decode_step_passes_the_pieces_of_chunks(slow):
    ahead, go, seen = slow
    waiting = [ahead.start(of(7, 3 * PIECE_ROWS))]
    until(lambda: seen == [7])
    waiting += [ahead.start(of(8, PIECE_ROWS)), ahead.start(of(9, 2))]
    go.set()
    for gathered in waiting:
        gathered.take(1)
        gathered.release()
    assert seen == [7, 9, 8, 7, 7]


def test_waiting_is_measured(slow):
    ahead, go, _ = slow
    gathered = ahead.start(of(7, 1))
    threading.Timer(0.1, go.set).start()
    gathered.take(1)
    assert 0.02 < gathered.wait_s < WAIT_S
    before_s = gathered.wait_s
    gathered.take(1)  # there already
    assert gathered.wait_s - before_s < 0.05
    assert ahead.wait_s == gathered.wait_s
    gathered.release()


def test_rows_given_up_are_not_gathered_and_their_buffer_waits_for_the_thread(slow):
    ahead, go, seen = slow
    gathered = ahead.start(of(7, 3 * PIECE_ROWS))
    until(lambda: seen == [7])
    taker, errors = threading.Thread(target=lambda: errors.append(failure(gathered.take))), []
    taker.start()
    gathered.release()
    assert ahead.n_lent == 1  # a thread still writes into it
    go.set()
    taker.join()
    assert "released before they were taken" in errors[0]
    until(lambda: ahead.n_lent == 0)
    assert seen == [7]


def failure(take) -> str:
    with pytest.raises(EngramAheadError) as error:
        take(1)
    return str(error.value)


def test_an_error_reaches_the_stage_that_takes_the_rows(tables, rng):
    cut = replace(tables[1], codes_e4m3=tables[1].codes_e4m3[:3])
    ahead = EngramAhead({1: cut, 14: tables[14]})
    lookback = lookbacks(rng, 400)
    gathered = ahead.start(lookback)
    assert failure(gathered.take).startswith("engram rows of layer 1: IndexError: index out of range")
    check_taken(tables[14], lookback, gathered.take(14))
    gathered.release()
    assert ahead.n_lent == 0
    ahead.close()


def test_closing_ends_the_threads_and_what_waits(slow):
    ahead, go, seen = slow
    waiting = [ahead.start(of(7, 1)), ahead.start(of(8, 1))]
    until(lambda: seen == [7])
    closer = threading.Thread(target=ahead.close)
    closer.start()
    until(lambda: ahead._closed)
    go.set()
    closer.join(WAIT_S)
    assert not closer.is_alive()
    assert not any(thread.is_alive() for thread in ahead._threads)
    waiting[0].take(1)  # was under way
    assert "closed" in failure(waiting[1].take)
    for gathered in waiting:
        gathered.release()
    assert ahead.n_lent == 0
    with pytest.raises(EngramAheadError, match="closed"):
        ahead.start(of(9, 1))
    ahead.close()


@pytest.fixture(scope="module", params=["micro", "tiny", "demo"])
def model(request, data_folder, golden_or_skip, tmp_path_factory):
    """`tiny` adds Engram twice before its sources end; `demo` has the release's roles."""
    if request.param == "demo":
        folder = tmp_path_factory.mktemp("demo")
        write_demo_checkpoint(folder, seed=0)
    else:
        folder = (data_folder if request.param == "micro" else golden_or_skip(".")) / request.param / "model"
    return Model.load(folder, kv_tokens=16 * PAGE, page_positions=PAGE, poison=True)


def test_answers_are_the_same_bits(model, rng):
    """Two prompts in chunks of their own and together, then decoded together: as stages that gather for themselves."""
    path = Path(model, random_path(rng, model.config, 2, 3))
    text = model.config.text_config
    n_first, n_alone = (90, 80) if text.num_hidden_layers < 40 else (24, 20)
    first, second = (rng.integers(9, text.vocab_size, n).tolist() for n in (n_first, n_first // 2))
    tables = {layer: weights.engram.table for layer, weights in model.weights.layers.items() if weights.engram}

    def answers(first_number, chunk_rows):
        one, other = first_number, first_number + 1
        path.open(one)
        path.open(other)
        for start in range(0, n_alone, chunk_rows):
            path.run(path.begin(one, first[start : min(n_alone, start + chunk_rows)], n_first)).release()
        together = path.add(one, first[n_alone:], n_first), path.add(other, second, len(second))
        out = [path.logits(path.run(path.embed(*together)))]
        out.append(path.logits(path.run(path.embed(path.add(other, [11]), path.add(one, [12])))))
        return out

    want = answers(0, n_alone)
    path.ahead = EngramAhead(tables)
    for number, chunk_rows in ((2, n_alone), (4, n_alone // 2 - 3)):
        assert answers(number, chunk_rows) == want
    assert path.ahead.n_lent == 0  # the last Engram layer lets them go
    assert path.used_bytes() == 0
    path.ahead.close()
