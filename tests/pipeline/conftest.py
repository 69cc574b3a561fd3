"""Engines over the `micro` checkpoint."""

from collections.abc import Callable, Iterator

import pytest
from engine_cases import PAGE

from rocline.engine.model import Model
from rocline.pipeline.engine import Engine
from rocline.pipeline.options import Options


@pytest.fixture(scope="session")
def micro(data_folder) -> Model:
    return Model.load(data_folder / "micro" / "model", kv_tokens=8192, page_positions=PAGE)


@pytest.fixture
def engines(micro) -> Iterator[Callable[..., Engine]]:
    """engines(model=micro, page_positions=PAGE, **options): an engine, closed at the end."""
    opened = []

    def open_engine(model: Model = micro, page_positions: int = PAGE, **options: object) -> Engine:
        defaults = {"stages": 3, "chunk_rows": 64, "mixed_chunk_rows": 32, "kv_tokens": 8192, "arena_gib": 0.25}
        chosen = Options(**{**defaults, **options})  # type: ignore[arg-type]
        engine = Engine(model.config, model.weights, chosen, page_positions=page_positions, poison=True)
        opened.append(engine)
        return engine

    yield open_engine
    for engine in opened:
        engine.close()
