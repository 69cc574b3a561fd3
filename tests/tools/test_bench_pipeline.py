"""The pipeline's benchmark on the smallest model: its figures, and that its soak notices what is left behind."""

import random
from dataclasses import replace

import pytest

from rocline.engine.model import Model
from rocline.pipeline.engine import Engine
from rocline.pipeline.options import Options
from rocline.tools import bench_pipeline

OPTIONS = Options(stages=2, running=4, queue=8, kv_tokens=1024, chunk_rows=32, mixed_chunk_rows=16)


@pytest.fixture(scope="module")
def micro(data_folder) -> Model:
    return Model.load(data_folder / "micro" / "model", kv_tokens=1024)


def test_every_stage_step_is_counted(micro):
    found = bench_pipeline.overhead(micro, n_stages=2, n_requests=2, n_tokens=5)
    n_visits = found["stage_steps"] / (2 * 5)  # of each request's prefill and four decode steps
    assert n_visits == int(n_visits) >= 2
    assert found["wall_us_per_stage_step"] > 0


def test_a_soak_ends_every_request_and_leaves_nothing(micro, rng):
    found = bench_pipeline.soak(micro, 25, random.Random(int(rng.integers(1 << 30))), OPTIONS, 64)
    assert sum(found["ended"].values()) == found["requests"] == 25


def test_what_is_left_behind_is_named(micro):
    engine = Engine(micro.config, micro.weights, OPTIONS, page_positions=64)
    stats = engine.stats()
    engine.close()
    with pytest.raises(RuntimeError, match=r"left behind: .*'pages': 3"):
        bench_pipeline._check_nothing_left(replace(stats, free_pages=stats.n_pages - 3), 0, 0)
    with pytest.raises(RuntimeError, match=r"'requests without an end': 1"):
        bench_pipeline._check_nothing_left(stats, 1, 0)
