"""The model folder, and servers over fake engines."""

import gc
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from running_server import RunningServer, serving, wait_until
from server_log import ServerLog
from wire import Speaker

from rocline.engine.config import ModelConfig
from rocline.tools.demo_checkpoint import demo_config
from rocline.tools.demo_tokenizer import tokenizer_json

CONTEXT = 1 << 20


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """config.json and tokenizer.json of the demo, with the release's context."""
    folder = tmp_path_factory.mktemp("model")
    config = demo_config()
    text = config["text_config"]
    text["max_position_embeddings"] = CONTEXT
    text["rope_scaling"]["original_max_position_embeddings"] = CONTEXT // text["rope_scaling"]["factor"]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_bytes(tokenizer_json())
    return folder


@pytest.fixture(scope="session")
def config(model_folder: Path) -> ModelConfig:
    return ModelConfig.load(model_folder)


@pytest.fixture
def serve(model_folder: Path, config: ModelConfig) -> Iterator[Callable[..., RunningServer]]:
    """serve(keys=(), options=Options(), settings...): a server of its own, stopped at the end."""
    with serving(model_folder, config) as make:
        yield make


@pytest.fixture(scope="module")
def shared(model_folder: Path, config: ModelConfig) -> Iterator[RunningServer]:
    with serving(model_folder, config) as make:
        yield make()


@pytest.fixture(autouse=True)
def _thaw() -> Iterator[None]:
    """A server that starts freezes what there is, here the tests' garbage too."""
    yield
    gc.unfreeze()


@pytest.fixture
def server_log(capfd: pytest.CaptureFixture[str]) -> ServerLog:
    """What servers log from here on."""
    return ServerLog()


@pytest.fixture
def speaker(server: RunningServer) -> Speaker:
    return Speaker(server.pool.tokenizer.encode, server.pool.markers)


@pytest.fixture
def server(shared: RunningServer) -> Iterator[RunningServer]:
    """The module's one server, with the engine as it was made."""
    engine = shared.engine
    made = {name: getattr(engine, name) for name in ("answer", "chunk_s", "step_s", "options")}
    engine.cancels.clear()
    yield shared
    engine.gate.set()
    for name, value in made.items():
        setattr(engine, name, value)
    wait_until(shared.quiet)
