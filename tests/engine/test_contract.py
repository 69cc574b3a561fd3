"""One request, one answer (design.md section 4), end to end on the reference's small models.

A prompt's logits and the logits of the tokens that follow are one sequence of bits, whatever the chunk
size, prefill mode, stages, pages, company, kept rows or verification length.
"""

import hashlib
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from rocline.engine.handoff import RowKind
from rocline.engine.model import Model, split_layers
from rocline.engine.sequence import REWIND_ROWS
from rocline.tools import demo_tokenizer
from rocline.tools.demo_checkpoint import write_demo_checkpoint

PAGE = 64  # small pages, so that prompts of a few hundred tokens cross several
FOLLOW = 5


@pytest.fixture(scope="module")
def model(data_folder):
    """`micro`, on which everything is tried."""
    return Model.load(data_folder / "micro" / "model", kv_tokens=8192, page_positions=PAGE, poison=True)


@pytest.fixture(scope="module", params=["tiny", "tiny40"])
def deeper(request, golden_or_skip):
    """More layers and other roles: what is most likely to depend on them is tried here too."""
    return Model.load(golden_or_skip(request.param) / "model", kv_tokens=8192, page_positions=PAGE, poison=True)


def again(model, **options) -> Model:
    return Model(model.config, model.weights, kv_tokens=8192, page_positions=PAGE, poison=True, **options)


def prompt(rng, model, n_rows) -> list[int]:
    """Text-like ids: short phrases that come back, so that n-grams and selections repeat."""
    phrases = [rng.integers(9, model.config.text_config.vocab_size, 6).tolist() for _ in range(12)]
    ids: list[int] = []
    while len(ids) < n_rows:
        ids += phrases[rng.integers(12)] + rng.integers(9, 200, 2).tolist()
    return ids[:n_rows]


def bits(logits: torch.Tensor) -> bytes:
    return logits.contiguous().numpy().tobytes()


def follow(model, handle, ids: Sequence[int]) -> list[bytes]:
    return [bits(model.decode([(handle, token)]).logits_f32) for token in ids]


def poison(model):
    """Free pages full of NaN codes: a row that is read without having been written shows."""
    for stage in model.stages:
        for plane in (*stage.planes.rows_u8.values(), *stage.planes.keys_u8.values()):
            plane[model.pages._free] = 0xFF


def answer(model, ids, more, **options) -> str:
    """Hash of the last prompt row's logits and those after each of `more`."""
    poison(model)
    handle = model.open()
    try:
        last = model.prefill(handle, ids, **options)[-1]
        assert last.finite_u8.all()
        return hashlib.sha256(b"".join([bits(last.logits_f32), *follow(model, handle, more)])).hexdigest()
    finally:
        model.close(handle)


def tail_hash(model, ids, more) -> str:
    handle = model.open()
    model.prefill(handle, ids)
    out = hashlib.sha256(b"".join(follow(model, handle, more))).hexdigest()
    model.close(handle)
    return out


def halo_rows(model) -> int:
    text = model.config.text_config
    return text.sliding_window + (text.num_hidden_layers - 1) * (text.sliding_window - 1)


def lengths(rng, model) -> list[int]:
    """Odd and even, past the candidate capacity, past a page, not multiples of 8."""
    text = model.config.text_config
    capacity = text.candidate_topk_blocks * text.candidate_block_size
    base = capacity + PAGE + int(rng.integers(8, 40))
    return [base | 1, (base | 1) + 1 + 2 * int(rng.integers(1, 3))]


def test_chunks_and_modes_change_nothing(model, rng):
    for n_rows in lengths(rng, model):
        ids, more = prompt(rng, model, n_rows), rng.integers(9, 400, FOLLOW).tolist()
        want = answer(model, ids, more, mode="full", chunk_rows=n_rows)
        for mode in ("full", "halo"):
            for chunk_rows in (7, 64, 500):
                assert answer(model, ids, more, mode=mode, chunk_rows=chunk_rows) == want, (n_rows, mode, chunk_rows)


def test_the_demo_past_its_candidates_in_small_steps(demo):
    """Chunks of 1, 7 and 64, decode at both parities, a neighbour and a way back, beyond 512 candidate positions."""
    ids, begin, end = demo_text(demo_tokenizer.load(), 534), 521, 534
    handle = demo.open()
    parts = demo.prefill(handle, ids, mode="full", chunk_rows=len(ids), all_logits=True)
    want = [bits(row) for row in parts[-1].logits_f32[begin:]]
    demo.truncate(handle, begin)
    assert follow(demo, handle, ids[begin : begin + 2]) == want[:2]
    demo.close(handle)

    handle, other = demo.open(), demo.open()
    demo.prefill(handle, ids[:begin], chunk_rows=64)
    kept = demo.snapshot(handle)
    assert follow(demo, handle, ids[begin : begin + 4]) == want[:4]
    for chunk_rows in (1, 7, 64):
        demo.restore(handle, kept)
        last = demo.prefill(handle, ids[begin:end], chunk_rows=chunk_rows)[-1]
        assert bits(last.logits_f32[0]) == want[-1], chunk_rows
    demo.restore(handle, kept)
    both = demo.extend([(other, ids[:30]), (handle, ids[begin:end])], RowKind.PREFILL)
    assert [bits(row) for row in both.logits_f32[30:]] == want
    demo.close(handle)
    demo.close(other)


def test_deeper_models_keep_the_contract(deeper, rng):
    ids, more = prompt(rng, deeper, lengths(rng, deeper)[int(rng.integers(2))]), [11, 12]
    want = answer(deeper, ids, more, mode="full", chunk_rows=500)
    assert answer(deeper, ids, more, chunk_rows=64) == want
    staged = again(deeper, stages=split_layers(deeper.config, int(rng.integers(2, 6)), early_kv_side=True))
    assert answer(staged, ids, more, chunk_rows=90) == want


def test_deeper_models_truncate_exactly(deeper, rng):
    ids = prompt(rng, deeper, 150)
    handle = deeper.open()
    deeper.prefill(handle, ids)
    deeper.truncate(handle, 101)
    got = hashlib.sha256(b"".join(follow(deeper, handle, [11, 12]))).hexdigest()
    deeper.close(handle)
    assert got == tail_hash(deeper, ids[:101], [11, 12])


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The demo checkpoint: 40 layers with the release's roles, 512 candidate positions."""
    folder = tmp_path_factory.mktemp("demo")
    write_demo_checkpoint(folder, seed=0)
    return Model.load(folder, kv_tokens=16_384, poison=True)


def demo_text(tokenizer, n_tokens) -> list[int]:
    text = (Path(sysconfig.get_path("stdlib")) / "argparse.py").read_text()
    return tokenizer.encode(text).ids[:n_tokens]


def test_the_demo_keeps_the_contract_on_real_text(demo, rng):
    """Greedy ids and logits over chunk sizes, modes and stages, past the candidate capacity, an odd length."""
    ids = demo_text(demo_tokenizer.load(), 701)

    def greedy(model, **options):
        handle, digest, out = model.open(), hashlib.sha256(), []
        logits = model.prefill(handle, ids, **options)[-1].logits_f32
        for _ in range(3):
            digest.update(bits(logits))
            out.append(int(logits[0].argmax()))
            logits = model.decode([(handle, out[-1])]).logits_f32
        model.close(handle)
        return out, digest.hexdigest()

    want = greedy(demo, mode="full", chunk_rows=len(ids))
    assert greedy(demo, chunk_rows=500) == want
    assert greedy(demo, chunk_rows=int(rng.integers(60, 200))) == want
    assert greedy(Model(demo.config, demo.weights, split_layers(demo.config, 8, early_kv_side=True))) == want


def test_a_chunk_of_one_row(model, rng):
    n_rows = 75
    ids, more = prompt(rng, model, n_rows), [11, 12]
    assert answer(model, ids, more, chunk_rows=1) == answer(model, ids, more, mode="full", chunk_rows=n_rows)


def test_random_splits(model, rng):
    ids = prompt(rng, model, lengths(rng, model)[0])
    want = answer(model, ids, [])
    handle, start = model.open(), 0
    while start < len(ids) - 1:  # each part is a prefill of its own, with its own halo
        stop = min(len(ids) - 1, start + int(rng.integers(1, 90)))
        model.prefill(handle, ids[start:stop], mode="halo" if rng.random() < 0.5 else "full", chunk_rows=50)
        start = stop
    last = model.prefill(handle, ids[start:])[-1]
    model.close(handle)
    assert hashlib.sha256(bits(last.logits_f32)).hexdigest() == want


def test_the_halo_skips_rows_and_one_less_would_break_it(model, rng):
    """The halo runs deep layers on few rows only, so that its equality with `full` says something."""
    text = model.config.text_config
    ids, deep = prompt(rng, model, halo_rows(model) + 40), []
    split = text.kv_source_layer_ids[-1] + 1
    handle = model.open()
    model.prefill(
        handle, ids, record=lambda layer, name, x: deep.append(len(x)) if (layer, name) == (split, "u_attn") else None
    )
    expected = text.sliding_window + (text.num_hidden_layers - 1 - split) * (text.sliding_window - 1)
    assert sum(deep) == expected < len(ids)
    ring = model.stages[0].sequences[handle.number].windows[text.num_hidden_layers - 1]
    assert (ring.first, ring.end) == (len(ids) - text.sliding_window, len(ids))
    model.close(handle)


def test_decode_continues_prefill_at_both_parities(model, rng):
    ids = prompt(rng, model, 60)
    for n_rows in (1, 2, 33, 34, 57):
        handle = model.open()
        model.prefill(handle, ids[:n_rows])
        stepped = bits(model.decode([(handle, ids[n_rows])]).logits_f32)
        model.close(handle)
        assert hashlib.sha256(stepped).hexdigest() == answer(model, ids[: n_rows + 1], [])


@pytest.mark.parametrize("n_stages", [2, 3, 5])
@pytest.mark.parametrize("early", [False, True], ids=["together", "kv-side-early"])
def test_stages_change_nothing(model, rng, n_stages, early):
    """Reuse layers on another stage than their source live on what the hand-off carries."""
    ids, more = prompt(rng, model, lengths(rng, model)[0]), rng.integers(9, 400, FOLLOW).tolist()
    staged = again(model, stages=split_layers(model.config, n_stages, early))
    want = answer(model, ids, more)
    for mode in ("halo", "full"):
        assert answer(staged, ids, more, mode=mode, chunk_rows=50) == want


def test_sequences_together_answer_as_alone(model, rng):
    """Several sequences of different lengths in one step, prefill and decode rows mixed, one leaving early."""
    prompts = [prompt(rng, model, n) for n in (37, 90, 121)]
    mores = [rng.integers(9, 400, FOLLOW).tolist() for _ in prompts]
    want = [answer(model, ids, more) for ids, more in zip(prompts, mores, strict=True)]
    handles = [model.open() for _ in prompts]
    got = [[] for _ in prompts]
    model.extend([(h, ids[:-2]) for h, ids in zip(handles, prompts, strict=True)], RowKind.PREFILL)
    mixed = [(h, ids[-2:]) for h, ids in zip(handles, prompts, strict=True)]
    mixed[1] = (handles[1], prompts[1][-2:-1])
    logits = model.extend(mixed, RowKind.PREFILL).logits_f32
    got[0].append(bits(logits[1]))
    got[2].append(bits(logits[4]))
    step = model.decode([(handles[1], prompts[1][-1]), (handles[0], mores[0][0])]).logits_f32
    got[1].append(bits(step[0]))
    got[0].append(bits(step[1]))
    got[2] += follow(model, handles[2], mores[2])
    model.close(handles[2])
    for i in range(1, FOLLOW):
        step = model.decode([(handles[0], mores[0][i]), (handles[1], mores[1][i - 1])]).logits_f32
        got[0].append(bits(step[0]))
        got[1].append(bits(step[1]))
    got[1] += follow(model, handles[1], mores[1][-1:])
    model.close(handles[0])
    model.close(handles[1])
    assert [hashlib.sha256(b"".join(parts)).hexdigest() for parts in got] == want


def test_verify_rows_equal_decode_and_can_be_taken_back(model, rng):
    """Every accept length 0..5 at both parities: rejected rows leave no trace (case B48)."""
    ids = prompt(rng, model, 90)
    drafts, more = rng.integers(9, 400, 5).tolist(), rng.integers(9, 400, 2).tolist()
    for n_rows in (63, 64):
        for accepted in range(6):
            handle = model.open()
            model.prefill(handle, ids[:n_rows])
            token = ids[n_rows]
            rows = model.verify(handle, [token, *drafts])
            model.truncate(handle, n_rows + 1 + accepted)
            got = [bits(rows.logits_f32[i]) for i in range(accepted + 1)] + follow(model, handle, more)
            model.close(handle)
            handle = model.open()
            model.prefill(handle, ids[:n_rows])
            assert got == follow(model, handle, [token, *drafts[:accepted], *more])
            model.close(handle)


def test_truncation_equals_a_cold_run(model, rng):
    ids = prompt(rng, model, halo_rows(model) + 90)
    more = rng.integers(9, 400, 3).tolist()
    for length in (len(ids) - 1, len(ids) - REWIND_ROWS - 3, PAGE, 33, 1):
        handle = model.open()
        model.prefill(handle, ids)
        model.truncate(handle, length)
        got = hashlib.sha256(b"".join(follow(model, handle, more))).hexdigest()
        model.close(handle)
        cold = model.open()
        model.prefill(cold, ids[:length])
        assert got == hashlib.sha256(b"".join(follow(model, cold, more))).hexdigest(), length
        model.close(cold)


def test_truncation_to_nothing_and_out_of_range(model, rng):
    ids = prompt(rng, model, 40)
    handle = model.open()
    model.prefill(handle, ids)
    model.truncate(handle, 0)
    last = model.prefill(handle, ids)[-1]
    assert hashlib.sha256(bits(last.logits_f32)).hexdigest() == answer(model, ids, [])
    with pytest.raises(ValueError, match="truncate to 41: the sequence has 40 rows"):
        model.truncate(handle, 41)
    model.close(handle)


def test_snapshots_are_exact_and_reusable(model, rng):
    ids, more = prompt(rng, model, 80), rng.integers(9, 400, FOLLOW).tolist()
    want = answer(model, ids[:61], more)
    handle = model.open()
    first = model.prefill(handle, ids[:61])[-1]
    kept = model.snapshot(handle)
    for tail in (ids[61:], ids[30:75]):
        model.prefill(handle, tail)
        model.restore(handle, kept)
        got = [bits(first.logits_f32), *follow(model, handle, more)]
        assert hashlib.sha256(b"".join(got)).hexdigest() == want
        model.restore(handle, kept)
    model.truncate(handle, 20)
    with pytest.raises(ValueError, match="does not continue the snapshot"):
        model.restore(handle, kept)
    model.close(handle)


def test_the_candidate_restriction_changes_selections(model, rng):
    """At these lengths a consumer's list differs from what it would choose over everything (case B20)."""
    text = model.config.text_config
    n_rows = lengths(rng, model)[1]
    consumer = next(role.layer for role in text.layers if role.reads_candidates)
    producer, size = text.candidate_source_layer_id, text.candidate_block_size
    seen: dict[str, torch.Tensor] = {}

    def record(layer, name, value):
        if (layer, name) in ((consumer, "index_score"), (consumer, "sel"), (producer, "cand_blocks")):
            seen[name] = value.clone()

    handle = model.open()
    model.prefill(handle, prompt(rng, model, n_rows), mode="full", record=record)
    model.close(handle)
    scores, chosen = seen["index_score"][-1], set(seen["sel"][-1].tolist())
    blocks = set(seen["cand_blocks"][-1].tolist())
    assert all(position // size in blocks for position in chosen)
    order = np.lexsort((np.arange(n_rows), -scores.numpy()))
    assert chosen != set(order[: text.index_topk].tolist())


def test_pages_come_back(model, rng):
    before, opened = model.pages.n_free, len(model.sequences)
    for _ in range(3):
        answer(model, prompt(rng, model, 130), [9, 10])
    assert model.pages.n_free == before
    assert len(model.sequences) == opened


def test_a_fuller_house_is_refused_before_anything_changes(model, rng):
    small = Model(model.config, model.weights, kv_tokens=2 * PAGE, page_positions=PAGE)
    handle = small.open()
    small.prefill(handle, prompt(rng, model, PAGE))
    other = small.open()
    with pytest.raises(RuntimeError, match=r"need 2 more pages of 64; 1 of 2 are free"):
        small.prefill(other, prompt(rng, model, PAGE + 1))
    assert other.length == 0
    more = rng.integers(9, 400, 3).tolist()
    ids = list(handle.ids)
    assert hashlib.sha256(b"".join(follow(small, handle, more))).hexdigest() == tail_hash(model, ids, more)
