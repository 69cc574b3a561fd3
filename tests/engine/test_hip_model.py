"""The whole model through HIP: one answer however it runs, the host's where references run, nothing allocated."""

from collections import Counter
from contextlib import closing

import numpy as np
import pytest
import torch
from hip_cases import OPTIONS, answer_of, run, write_fitting_model
from stage_paths import Path, random_path

from rocline.engine.answer import Ask
from rocline.engine.engram_ahead import EngramAhead
from rocline.engine.handoff import RowKind
from rocline.engine.home import HipHome
from rocline.engine.logprobs import logprobs_of
from rocline.engine.model import Model, split_layers
from rocline.engine.sampling import SamplerState, SamplingParams, pack_rows
from rocline.engine.stage import Stage
from rocline.hip_kernels.device_ops import KERNELS
from rocline.hip_kernels.dispatch import DispatchError
from rocline.hip_kernels.kernel import launch_counts
from rocline.hip_kernels.linear_hip import use_forms
from rocline.hip_kernels.sampling import sample

INDEX_OPERATORS = ["index_key", "index_prepare", "index_query", "index_select", "index_select_among"]


@pytest.fixture(scope="module")
def model(fitting_folder):
    return Model.load(fitting_folder, device="hip", **OPTIONS)


@pytest.fixture(scope="module")
def micro(hip_device, micro_model):
    """Its index vectors are of a width that no kernel fits: references among kernels."""
    return Model.load(micro_model, device="hip", **OPTIONS)


@pytest.fixture(scope="module")
def host(fitting_folder):
    return Model.load(fitting_folder, kv_tokens=4096)


def prompt(rng, n):
    return rng.integers(9, 500, n).tolist()


def again(model, **options):
    """The same weights on the same device, placed anew."""
    return Model(model.config, model.weights, home=model.home, **OPTIONS | options)


def test_it_runs_by_kernels(model, rng):
    before = launch_counts()
    run(model, prompt(rng, 20), n_decoded=1)
    launched = {name for name, _ in launch_counts() - before}
    kernels = {"attention_values", "mhc_finish", "mhc_few", "expert_sort", "window_row", "latents_few", "compress"}
    assert kernels | {"index_block_max", "index_block_max_few"} <= launched


@pytest.mark.parametrize(("which", "mode"), [("model", "halo"), ("model", "full"), ("micro", "halo")])
def test_chunks_change_no_bit(request, hip_device, rng, which, mode):
    model = request.getfixturevalue(which)
    n_tokens, sizes = (60, (19,)) if hip_device == "cpu" else (2500, (4096, 2048, 1024, 256, 64, 17))
    ids = prompt(rng, n_tokens)
    want = run(model, ids)
    for chunk_rows in sizes:
        assert run(model, ids, mode=mode, chunk_rows=chunk_rows) == want


def test_row_counts_change_no_bit(hip_device, model, rng):
    """Every row's logits, with the row alone or among others."""
    n_tokens, sizes = (34, (16, 17)) if hip_device == "cpu" else (200, (1, 2, 6, 8, 15, 16, 17, 64, 65, 128))
    ids, got = prompt(rng, n_tokens), {}
    for chunk_rows in (n_tokens, *sizes):
        handle = model.open()
        parts = model.prefill(handle, ids, mode="full", chunk_rows=chunk_rows, all_logits=True)
        got[chunk_rows] = torch.cat([part.logits_f32 for part in parts]).numpy().tobytes()
        model.close(handle)
    assert len(set(got.values())) == 1


def test_stages_change_no_bit(model, rng):
    ids = prompt(rng, 40)
    want = run(model, ids, n_decoded=1)
    for n_stages, early in ((2, False), (5, True)):
        cut = again(model, stages=split_layers(model.config, n_stages, early_kv_side=early))
        assert run(cut, ids, n_decoded=1, chunk_rows=21) == want


@pytest.mark.parametrize(("n_devices", "is_pinned"), [(1, False), (1, True), (3, True)])
def test_folded_visits_change_no_bit(model, rng, n_devices, is_pinned):
    ids = prompt(rng, 60)
    want = [run(model, ids, n_decoded=0), run(model, [*ids, 20], n_decoded=0)]
    tables = {layer: w.engram.table for layer, w in model.weights.layers.items() if w.engram}
    with model.at_the_ends(), closing(EngramAhead(tables, is_pinned=is_pinned)) as ahead:
        path = Path(model, random_path(rng, model.config, n_devices, n_visits=4))
        path.ahead = ahead
        path.open(0)
        path.run(path.begin(0, ids[:33], end=60))
        got = [path.logits(path.run(path.begin(0, ids[33:], end=60))), path.logits(path.run(path.begin(0, [20])))]
    assert got == want


def test_a_step_of_two_sequences_on_several_devices(model, rng):
    """Both close a pair in it, whose rows go to every device that mirrors them."""
    prompts = [prompt(rng, n) for n in (33, 35)]
    want = [run(model, [*ids, 20], n_decoded=0) for ids in prompts]
    tables = {layer: w.engram.table for layer, w in model.weights.layers.items() if w.engram}
    with model.at_the_ends(), closing(EngramAhead(tables)) as ahead:
        path = Path(model, random_path(rng, model.config, 3, n_visits=4))
        path.ahead = ahead
        for sequence, ids in enumerate(prompts):
            path.open(sequence)
            path.run(path.begin(sequence, ids, end=len(ids))).release()
        got = path.logits(path.run(path.embed(*(path.add(sequence, [20]) for sequence in range(2)))))
    assert got == b"".join(want)


@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SamplingParams(seed=7, top_p=0.9, top_k=40)])
def test_tokens_are_chosen_as_on_the_host(model, rng, params):
    ids = prompt(rng, 30)
    sampler = SamplerState(params, ids, [1], model.config.text_config.vocab_size)
    got = answer_of(model, ids, Ask(sampler, n_logprobs=3, keep_logits=True))
    handle = model.open()
    logits_f32 = model.prefill(handle, ids)[-1].logits_f32
    model.close(handle)
    assert torch.equal(got.logits_f32, logits_f32[0])
    token_i32 = torch.empty(1, dtype=torch.int32)
    sample(logits_f32, pack_rows([(sampler, ())]), token_i32)
    assert got.token == int(token_i32)
    assert got.logprobs.top_ids == logprobs_of(logits_f32, [got.token], 3).top_ids


def test_a_batch_changes_no_bit(model, rng):
    prompts = [prompt(rng, n) for n in (1, 6, 17, 30)]
    want = [run(model, ids, n_decoded=1) for ids in prompts]
    handles = [model.open() for _ in prompts]
    first = model.extend(list(zip(handles, prompts, strict=True)), RowKind.PREFILL).logits_f32
    rows = [first[[n - 1 for n in np.cumsum([len(ids) for ids in prompts])]]]
    rows += [model.decode([(handle, 20 + token) for handle in handles]).logits_f32 for token in range(1)]
    for handle in handles:
        model.close(handle)
    got = torch.stack(rows, 1)
    assert [own.numpy().tobytes() for own in got] == want


def test_verified_rows_and_what_follows_a_rejected_one(model, rng):
    ids, more = prompt(rng, 45), prompt(rng, 7)
    handle, alone = model.open(), model.open()
    for each in (handle, alone):
        model.prefill(each, ids)
    verified = model.verify(handle, more).logits_f32
    stepped = [model.decode([(alone, token)]).logits_f32[0] for token in more]
    assert torch.equal(verified, torch.stack(stepped))
    for each in (handle, alone):
        model.truncate(each, len(ids) + 3)
    taken_back = model.decode([(handle, 11)]).logits_f32
    assert torch.equal(taken_back, model.decode([(alone, 11)]).logits_f32)
    model.close(handle)
    model.close(alone)


def test_a_snapshot_is_gone_back_to(model, rng):
    handle = model.open()
    model.prefill(handle, prompt(rng, 37))
    kept = model.snapshot(handle)
    want = [model.decode([(handle, token)]).logits_f32 for token in (11, 12)]
    model.prefill(handle, prompt(rng, 30))
    model.restore(handle, kept)
    got = [model.decode([(handle, token)]).logits_f32 for token in (11, 12)]
    model.close(handle)
    assert torch.equal(torch.cat(got), torch.cat(want))


def test_references_on_the_device_give_the_hosts_bits(hip_device, micro_model, rng):
    """Everything but arithmetic is then the device path's own: memory, uploads, rings, pages."""
    if hip_device != "cpu":
        pytest.skip("a card's library sums are its own")
    ids = prompt(rng, 60)
    host = Model.load(micro_model, kv_tokens=4096)
    model = Model.load(micro_model, device="hip", reference_ops=list(KERNELS), **OPTIONS)
    assert run(model, ids, chunk_rows=23) == run(host, ids)


def test_index_kernels_choose_as_their_references_do(model, fitting_folder, rng):
    ids = prompt(rng, 150)
    plain = Model.load(fitting_folder, device="hip", reference_ops=INDEX_OPERATORS[1:], **OPTIONS)
    assert run(plain, ids, n_decoded=1) == run(model, ids, n_decoded=1)


def test_references_are_listed(micro):
    home = HipHome(micro.config.text_config, reference_ops=["experts"])
    assert "torch reference of experts: as asked for" in str(home)
    assert "torch reference of index_query: its kernel wants 128 index channels" in str(home)
    assert home.place.has("router")
    assert not home.place.has("experts")


def test_an_unknown_operator_is_refused_and_the_nearest_named(micro):
    with pytest.raises(DispatchError, match=r"reference operator 'atention'; did you mean attention\? there are"):
        HipHome(micro.config.text_config, reference_ops=["atention"])


def test_nothing_is_allocated_after_loading(hip_device, model, rng):
    """By the driver's count and torch's own."""
    device = model.home.place.device

    def counts():
        torch_count = torch.cuda.memory_stats()["num_device_alloc"] if hip_device != "cpu" else 0
        reading = device.memory()
        return reading.n_slabs_ever, reading.slab_bytes, torch_count

    ids = prompt(rng, 70)
    if hip_device != "cpu":
        run(model, ids)  # torch's copies take their first blocks
    before = counts()
    run(model, ids, chunk_rows=33)
    assert counts() == before


def test_sequences_have_room_on_the_device_or_are_refused(fitting_folder, host):
    model = Model(host.config, host.weights, home=HipHome(host.config.text_config, sequences_at_once=2), **OPTIONS)
    first, second = model.open(), model.open()
    with pytest.raises(RuntimeError, match="no room for the rings of one more sequence"):
        model.open()
    model.close(first)
    model.close(model.open())
    model.close(second)


# Kernels of a layer by its kind: of a decode row, what the design allows for that, and of a prefill chunk, with
# products cut in parts and with whole ones, as they are where rows are many. Where more than 512 candidate blocks are
# kept, a reindex layer chooses from them in a launch of its own. What merges the last layer's output at the end of a
# stage's visit is of no layer.
LAUNCHES = {
    "window": (9, 10, 26, 20),
    "full": (16, 18, 37, 29),
    "full, pairs, Engram": (17, 18, 43, 34),
    "reuse": (10, 11, 26, 20),
    "reindex": (13, 15, 31, 24),
}
CHUNK_ROWS = 70


def kind_of(role):
    pairs, engram = ", pairs" if role.owns_rows and role.ratio == 2 else "", "" if role.engram is None else ", Engram"
    return f"{role.kind}{pairs}{engram}"


@pytest.fixture
def launches_by_kind(monkeypatch):
    """Of a call to a model: the kernels that it launches in a layer of each kind, by the driver's count."""
    by_layer, step = Counter(), Stage._step

    def counted(stage, work, layer, *others):
        before = launch_counts().total()
        result = step(stage, work, layer, *others)
        by_layer[layer] += launch_counts().total() - before
        return result

    monkeypatch.setattr(Stage, "_step", counted)

    def of(model, work):
        by_layer.clear()
        work()
        kinds = {}
        for role in model.config.text_config.layers:
            kinds.setdefault(kind_of(role), set()).add(by_layer[role.layer])
        return kinds

    return of


@pytest.mark.parametrize(("n_sequences", "more"), [(1, 0), (2, 0), (3, 4)])
def test_launches_of_a_decode_row(model, rng, launches_by_kind, n_sequences, more):
    """Two rows take no more of them than one; norms and coefficients of more have launches of their own."""
    handles = [model.open() for _ in range(n_sequences)]
    for handle in handles:
        model.prefill(handle, prompt(rng, 41))
    got = launches_by_kind(model, lambda: model.decode([(handle, 11) for handle in handles]))
    for handle in handles:
        model.close(handle)
    for kind, (_, allowed, *_) in LAUNCHES.items():
        print(f"{kind}: {got[kind]} kernels of a decode row, {allowed} allowed")
    more_of = {kind: more + (2 if more and "Engram" in kind else 0) for kind in LAUNCHES}  # decoded, multiplied, gated
    assert got == {kind: {today + more_of[kind]} for kind, (today, *_) in LAUNCHES.items()}
    assert all(today <= allowed for today, allowed, *_ in LAUNCHES.values())


class WholeProducts(dict):
    """Forms for use_forms: of many rows no product is cut in parts."""

    def get(self, key, rule):
        return 1


@pytest.fixture
def launches_of_a_chunk(launches_by_kind):
    """Of a model: kernels of a prefill chunk by its layers' kinds, with products in parts and whole."""

    def of(model):
        got = []
        for forms in ({}, WholeProducts()):
            handle = model.open()
            model.prefill(handle, [11] * 20)
            use_forms(forms)
            try:
                got.append(launches_by_kind(model, lambda to=handle: model.prefill(to, [12] * CHUNK_ROWS, mode="full")))
            finally:
                use_forms({})
            model.close(handle)
        for kind in got[0]:
            print(f"{kind}: {got[0][kind]} kernels of a chunk of {CHUNK_ROWS} rows, {got[1][kind]} with whole products")
        return got

    return of


def test_launches_of_a_window_only_layer_with_engram(
    hip_device, micro_model, tmp_path, rng, launches_by_kind, launches_of_a_chunk
):
    """As layer 1 of the release is; here it is layer 0."""
    folder = write_fitting_model(micro_model, tmp_path / "model", engram_layer_ids=[0])
    model = Model.load(folder, device="hip", **OPTIONS)
    handle = model.open()
    model.prefill(handle, prompt(rng, 41))
    got = launches_by_kind(model, lambda: model.decode([(handle, 11)]))
    model.close(handle)
    print(f"window, Engram: {got['window, Engram']} kernels of a decode row, 10 allowed")
    assert got["window, Engram"] == {10}
    in_parts, whole = launches_of_a_chunk(model)
    assert (in_parts["window, Engram"], whole["window, Engram"]) == ({31}, {24})
    assert (in_parts["full, pairs"], whole["full, pairs"]) == ({38}, {30})


def test_launches_of_a_prefill_chunk(model, launches_of_a_chunk):
    got_in_parts, got_whole = launches_of_a_chunk(model)
    assert got_in_parts == {kind: {in_parts} for kind, (*_, in_parts, _) in LAUNCHES.items()}
    assert got_whole == {kind: {whole} for kind, (*_, whole) in LAUNCHES.items()}
