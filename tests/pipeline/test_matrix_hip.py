"""One answer over every way to run it, by kernels: chunk sizes, cuts, prefill modes, company, row counts.

On a card a model of forty layers and prompts of up to 5,000 tokens; on the CPU double a few cells of micro's layers.
With -s each cell prints what it compared.
"""

import gc
import json
import threading
import time
from dataclasses import dataclass

import numpy as np
import pytest
from engine_cases import PAGE, Ask, check, nothing_left, prompt_ids
from hip_cases import write_fitting_model

from rocline.engine.config import ModelConfig
from rocline.engine.digest import LogitsDigest
from rocline.engine.generation import Generation
from rocline.engine.model import Model
from rocline.engine.sampling import SamplingParams
from rocline.hip_kernels.graph import Graph
from rocline.pipeline.engine import Engine
from rocline.pipeline.options import Options
from rocline.pipeline.request import Request
from rocline.pipeline.warm_up import prepare_kernels


@dataclass(frozen=True)
class Sizes:
    """
    lengths     of the prompts; the first is asked alone too
    tail_rows   of the first prompt, that go through in few rows at a time
    row_counts  of those, and of decode steps; the last is of chunks alone
    cells       (chunk rows, stages)
    """

    config: str
    context: int
    arena_gib: float
    lengths: tuple[int, ...]
    n_tokens: int
    tail_rows: int
    row_counts: tuple[int, ...]
    cells: tuple[tuple[int, int], ...]


CHUNK_ROWS, STAGES = (256, 700, 2048, 4096), (1, 2, 4, 8)
CARD = Sizes(
    config="tiny40",
    context=8192,
    arena_gib=1.0,
    lengths=(5000, 4988, 650, 513, 512, 257, 64, 1),
    n_tokens=6,
    tail_rows=200,
    row_counts=(1, 2, 6, 8, 15, 16, 17, 64, 2048),
    cells=tuple((rows, stages) for rows in CHUNK_ROWS for stages in STAGES),
)
DOUBLE = Sizes(
    config="micro",
    context=512,
    arena_gib=0.06,
    lengths=(40, 17, 1),
    n_tokens=2,
    tail_rows=8,
    row_counts=(6, 64),
    cells=((16, 2), (64, 4)),
)
SAMPLED = {"temperature": 1.0, "top_p": 0.95, "seed": 20_261_130, "repetition_penalty": 1.1}


@pytest.fixture(scope="module")
def sizes(hip_device) -> Sizes:
    return DOUBLE if hip_device == "cpu" else CARD


@pytest.fixture(scope="module")
def model(sizes, data_folder, golden_or_skip, tmp_path_factory) -> Model:
    golden = data_folder if sizes.config == "micro" else golden_or_skip(".")
    folder = write_fitting_model(golden / sizes.config / "model", tmp_path_factory.mktemp("matrix") / "model")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 8192  # the golden models' 4,096 are fewer than a prompt's
    (folder / "config.json").write_text(json.dumps(config))
    if sizes is CARD:  # on all cores, not one by one as they are needed
        prepare_kernels(ModelConfig.load(folder), Options(device="hip", chunk_rows=max(CHUNK_ROWS)))
    arena_bytes = int(sizes.arena_gib * 2**30)
    return Model.load(folder, device="hip", kv_tokens=4 * 8192, page_positions=PAGE, arena_bytes=arena_bytes)


@dataclass(frozen=True)
class Answer(Ask):
    """output_ids, which the hashes are of."""

    output_ids: tuple[int, ...]


@pytest.fixture(scope="module")
def answers(model, sizes, request) -> list[Answer]:
    """Of prompts that went through in one piece: greedy and sampled by turns."""
    rng = np.random.default_rng(request.config.option.seed)
    made = []
    for number, n_rows in enumerate(sizes.lengths):
        sampling = SAMPLED if number % 2 else {"temperature": 0.0}
        params = SamplingParams(max_tokens=sizes.n_tokens, ignore_eos=True, **sampling)
        prompt = prompt_ids(rng, n_rows)
        whole = Generation(model, prompt, params, mode="full", chunk_rows=n_rows)
        output_ids = tuple(whole)
        asked = Request(prompt_ids=prompt, params=params, logits_digest=True)
        made.append(Answer(asked, whole.output_ids_sha256, whole.logits_sha256, output_ids))
    return made


def cells(sizes: Sizes) -> list[dict[str, object]]:
    """Each chunk size, and each number of stages, with both placements in both prefill modes."""
    found = []
    for number, (chunk_rows, stages) in enumerate(sizes.cells):
        row, column = divmod(number, len(STAGES))
        placement = "contiguous" if (row ^ column) & 1 or stages == 1 else "folded"
        prefill = "full" if (row ^ column) & 2 else "halo"
        found.append({"chunk_rows": chunk_rows, "stages": stages, "placement": placement, "prefill": prefill})
    return found


@pytest.fixture
def opened(model, sizes):
    """opened(**options): an engine over the model's weights, its steps captured; one at a time."""
    engines = []

    def close_last():
        while engines:
            engines.pop().close()
        gc.collect()  # it holds memory of the card that the next one's plan counts on

    def open_engine(**options) -> Engine:
        close_last()
        chosen = Options(
            device="hip",
            devices=1,
            context=sizes.context,
            kv_tokens=4 * 8192,
            mixed_chunk_rows=options["chunk_rows"],
            arena_gib=sizes.arena_gib,
            running=len(sizes.lengths),
            **options,
        )
        engine = Engine(model.config, model.weights, chosen, page_positions=PAGE, poison=True, warms_up=False)
        engines.append(engine)
        engine._assembly.capture_steps(chosen.running, engine.context)
        return engine

    yield open_engine
    close_last()


@pytest.fixture
def launched(monkeypatch) -> set[str]:
    """Names of the threads that have launched captured steps."""
    threads, launch = set(), Graph.launch

    def noted(graph):
        threads.add(threading.current_thread().name)
        launch(graph)

    monkeypatch.setattr(Graph, "launch", noted)
    return threads


def test_chunks_cuts_and_company_change_nothing(opened, answers, sizes, launched):
    for cell in cells(sizes):
        began_s = time.monotonic()
        launched.clear()
        engine = opened(**cell)
        with nothing_left(engine):
            check(engine.submit(answers[0].request), answers[0], cell)
            together = [engine.submit(answer.request) for answer in answers]
            for stream, answer in zip(together, answers, strict=True):
                check(stream, answer, cell)
        assert launched == {f"stage {number}" for number in range(cell["stages"])}, cell
        first = answers[0]
        print(f"{cell}: {first.ids_sha256[:8]} {first.logits_sha256[:8]}, {time.monotonic() - began_s:.1f} s")


def test_row_counts_of_chunks_change_nothing(model, answers, sizes):
    """The end of a long prompt a few rows at a time."""
    answer, tail = answers[0], sizes.tail_rows
    ids = answer.request.prompt_ids
    for n_rows in sizes.row_counts:
        began_s, handle, digest = time.monotonic(), model.open(), LogitsDigest()
        start = 0 if n_rows > tail else len(ids) - tail
        if start:
            model.prefill(handle, ids[:start], mode="full", chunk_rows=max(sizes.row_counts))
        digest.add(model.prefill(handle, ids[start:], mode="full", chunk_rows=n_rows)[-1].logits_f32)
        for token in answer.output_ids[:-1]:
            digest.add(model.decode([(handle, token)]).logits_f32)
        assert digest.hexdigest() == answer.logits_sha256, n_rows
        model.close(handle)
        print(f"chunks of {n_rows} rows: {answer.logits_sha256[:8]}, {time.monotonic() - began_s:.1f} s")


def test_row_counts_of_steps_change_nothing(model, answers, sizes, launched):
    """Of captured steps: the shorter prompts decoded together, several times each."""
    short = [answer for answer in answers if len(answer.request.prompt_ids) < 1000]
    step_rows = sizes.row_counts[:-1]
    model.capture_steps(max(step_rows))
    for n_rows in step_rows:
        began_s = time.monotonic()
        rows = [(model.open(), LogitsDigest(), short[number % len(short)]) for number in range(n_rows)]
        for handle, digest, answer in rows:
            digest.add(model.prefill(handle, answer.request.prompt_ids)[-1].logits_f32)
        for step in range(sizes.n_tokens - 1):
            logits_f32 = model.decode([(handle, answer.output_ids[step]) for handle, _, answer in rows]).logits_f32
            for row, (_, digest, _) in enumerate(rows):
                digest.add(logits_f32[row : row + 1])
        for handle, digest, answer in rows:
            assert digest.hexdigest() == answer.logits_sha256, n_rows
            model.close(handle)
        print(f"steps of {n_rows} rows: {time.monotonic() - began_s:.1f} s")
    assert launched == {threading.current_thread().name}
