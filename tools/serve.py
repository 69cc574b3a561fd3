"""`rocline serve`: the server, and where each of its settings comes from."""

from __future__ import annotations

import argparse
import asyncio
import difflib
import json
import os
import signal
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import msgspec

from rocline.engine.config import ConfigError, ModelConfig
from rocline.engine.synthetic import seed_of
from rocline.engine.text import TokenizerError
from rocline.http.pool import PromptPool
from rocline.http.prompt import Limits
from rocline.http.server import Server, is_opening
from rocline.http.serving import EngineApi, Serving
from rocline.http.settings import Settings
from rocline.pipeline.options import Options
from rocline.pipeline.worker import SWITCH_INTERVAL_S
from rocline.tools.files import FileError, explained, read_text
from rocline.tools.synthetic_model import files_of, open_engine

EXIT_WRONG_INPUT = 2
PREFIX = "ROCLINE_"
KEYS_VARIABLE = PREFIX + "API_KEYS"
OTHER_VARIABLES = frozenset({KEYS_VARIABLE, PREFIX + "GOLDEN", PREFIX + "CONFIG"})  # not settings
CONFIG_FILE = "rocline.toml"
CONTINUED = " " * 12  # of a docstring: no name of a setting stands as far in


class ConfigurationError(ValueError):
    """A setting that does not exist, or a value it cannot have."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """
    model  Folder of the checkpoint; or synthetic:SEED, noise of the release's sizes, to measure with.
    """

    model: str


class Setting(NamedTuple):
    """One of the fields of Command, Settings and Options."""

    owner: type
    field: Field[Any]
    type: Any

    @property
    def default(self) -> Any:
        return None if self.field.default is MISSING else self.field.default


class Value(NamedTuple):
    value: Any
    origin: str


SETTINGS = {
    field.name: Setting(owner, field, get_type_hints(owner)[field.name])
    for owner in (Command, Settings, Options)
    for field in fields(owner)
}


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "serve",
        description="Serve a checkpoint over HTTP, with OpenAI's routes and SGLang's. Every setting below is also "
        f"{PREFIX}NAME in the environment and `name = value` in {CONFIG_FILE}; a flag counts before the environment, "
        f"that before the file. API keys: one a line in --api-key-file, or in {KEYS_VARIABLE} with commas between.",
    )
    parser.add_argument("--config", metavar="FILE", help=f"File of settings. (default {CONFIG_FILE}, if it is there)")
    parser.add_argument("--check", action="store_true", help="Print every setting and where it comes from, and end.")
    for name, setting in SETTINGS.items():
        default = f" (default {_shown(setting.default)})" if setting.default not in (None, ()) else ""
        parser.add_argument(_flag(name), metavar=_metavar(name), help=_help(name) + default)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _metavar(name: str) -> str:
    """What stands for a setting's value in its help: the unit, where it has one."""
    return _METAVARS.get(name) or ("S" if name.endswith("_s") else _form(name).metavar)


_METAVARS = {"model": "FOLDER", "api_key_file": "FILE", "arena_gib": "GIB"}


class Form(NamedTuple):
    """How values of a type are written, in a line of help and in a sentence."""

    metavar: str
    text: str


_FORMS: dict[Any, Form] = {
    bool: Form("true|false", "true or false"),
    int: Form("N", "a whole number"),
    float: Form("X", "a number"),
    str: Form("NAME", "text"),
    tuple[str, ...]: Form("NAME,NAME", "names with commas between"),
}


def _form(name: str) -> Form:
    kind = SETTINGS[name].type
    if get_origin(kind) is Literal:
        return Form("{" + ",".join(get_args(kind)) + "}", " or ".join(get_args(kind)))
    return next(form for plain, form in _FORMS.items() if kind in (plain, plain | None))


def _help(name: str) -> str:
    """From the docstring of the class that owns the setting: its lines are `name  text`, and what is farther in goes
    on. Sentences, with units."""
    texts: list[str] = []
    for line in (SETTINGS[name].owner.__doc__ or "").splitlines():
        word, _, text = line.strip().partition("  ")
        if texts:
            if not line.startswith(CONTINUED):
                break
            texts.append(line.strip())
        elif word == name:
            texts.append(text.strip())
    return " ".join(texts).replace("%", "%%")


def run(args: argparse.Namespace) -> int:
    try:
        values = configuration(vars(args), os.environ, args.config)
        model = values["model"].value
        seed_of(model)  # refused here too, where nothing is opened
        settings, options = build(values, Settings), build(values, Options)
        keys = api_keys(settings, os.environ)
        if args.check:
            print(json.dumps({name: value._asdict() for name, value in values.items()}, indent=2))
            return 0
        with files_of(model) as folder:
            check_context(values, ModelConfig.load(folder))
            status = serve(str(folder), settings, options, keys, lambda: open_engine(model, folder, options))
        if is_opening():  # in threads that the interpreter would wait for, or end inside torch: a crash
            os._exit(status)
        return status
    except (ConfigurationError, ConfigError, TokenizerError) as error:
        print(f"serve: {error}", file=sys.stderr)
        return EXIT_WRONG_INPUT
    except OSError as error:
        advice = "choose another with --host or --port"
        told = explained(error) if error.filename else f"{cannot_listen(settings, error)}; {advice}"
        print(f"serve: {told}", file=sys.stderr)
        return EXIT_WRONG_INPUT


def check_context(values: Mapping[str, Value], config: ModelConfig) -> None:
    """Raises ConfigurationError for a context that the model has no positions for."""
    limit, (context, origin) = config.text_config.max_position_embeddings, values["context"]
    if context and context > limit:
        said = _said("context", context, origin)
        raise ConfigurationError(f"{said}: must be 1 to {limit}, the model's limit")


def cannot_listen(settings: Settings, error: OSError) -> str:
    """Why the server cannot listen."""
    reason = str(error.strerror or error).partition(" (while ")[0]  # the address once
    return f"{settings.host}, port {settings.port}: {reason}"


def serve(
    folder: str,
    settings: Settings,
    options: Options,
    keys: Sequence[str],
    open_engine: Callable[[], EngineApi],
) -> int:
    """Serve until SIGTERM or SIGINT; the exit status. Raises ConfigError, TokenizerError and OSError."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    config = ModelConfig.load(folder)
    text = config.text_config
    context = min(options.context or text.max_position_embeddings, text.max_position_embeddings)
    pool = PromptPool(folder, Limits(context, text.vocab_size, settings.thinking), settings.workers)

    async def main() -> int:
        server = Server(Serving(folder, settings, config, context, pool), open_engine, keys)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, server.stop)
        return await server.run()

    return asyncio.run(main())


def configuration(
    flags: Mapping[str, Any], environ: Mapping[str, str], config: str | None, sets: Mapping[str, str] | None = None
) -> dict[str, Value]:
    """Every setting with its value and where that is from. Raises ConfigurationError.

    config  the file's name, if a flag gave it
    sets    of --set, in commands that have no flag for each setting
    """
    values = {name: Value(setting.default, "default") for name, setting in SETTINGS.items()}
    file = config or environ.get(PREFIX + "CONFIG") or CONFIG_FILE
    for key, value in _read(file, required=file != CONFIG_FILE or config is not None).items():
        name = _known(key, file, SETTINGS)
        values[name] = Value(_converted(name, value, file), file)
    variables = {PREFIX + name.upper(): name for name in SETTINGS}
    for variable in sorted(environ):
        if variable.startswith(PREFIX) and variable not in OTHER_VARIABLES:
            name = variables[_known(variable, "the environment", variables)]
            values[name] = Value(_converted(name, environ[variable], variable), variable)
    for name in SETTINGS:
        if flags.get(name) is not None:
            values[name] = Value(_converted(name, flags[name], _flag(name)), _flag(name))
        if sets and name in sets:
            values[name] = Value(_converted(name, sets[name], f"--set {name}"), f"--set {name}")
    if values["model"].value is None:
        raise ConfigurationError("no model; name the checkpoint's folder with --model")
    return values


def _read(file: str, required: bool) -> dict[str, Any]:
    if not required and not Path(file).exists():
        return {}
    try:
        return tomllib.loads(read_text(file))
    except FileError as error:
        raise ConfigurationError(str(error)) from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{file}: not TOML: {error}") from error


def _known(name: str, where: str, names: Mapping[str, Any]) -> str:
    if name not in names:
        near = difflib.get_close_matches(name, names, 1, 0)
        raise ConfigurationError(f"{where}: no setting {name}; the nearest is {near[0]}")
    return name


def _converted(name: str, value: Any, where: str) -> Any:
    """A word of the environment or the command line, or a value of the file, as the setting's type."""
    kind = SETTINGS[name].type
    if kind == tuple[str, ...] and isinstance(value, str):
        value = [word.strip() for word in value.split(",") if word.strip()]
    try:
        return msgspec.convert(value, kind, strict=not isinstance(value, str))
    except msgspec.ValidationError:
        raise ConfigurationError(f"{_said(name, value, where)}: must be {_form(name).text}") from None


def _said(name: str, value: Any, origin: str) -> str:
    """A setting as it was written at its origin."""
    if origin.startswith("--set "):
        return f"{origin}={_shown(value)}"
    if origin.startswith("--"):
        return f"{origin} {_shown(value)}"
    if origin.startswith(PREFIX):
        return f"{origin}={_shown(value)}"
    return f"{origin}: {name} = {value!r}"


def build(values: Mapping[str, Value], owner: type) -> Any:
    """Settings or Options from their values. Raises ConfigurationError."""
    try:
        return owner(**{field.name: values[field.name].value for field in fields(owner)})
    except ValueError as error:
        name, found = str(error).partition(" ")[0], str(error)
        if name not in values or values[name].origin == "default":
            raise ConfigurationError(found) from None
        value, origin = values[name]
        said, named = _said(name, value, origin), f"{name} = {value}: "
        text = f"{said}: {found.removeprefix(named)}" if found.startswith(named) else f"{origin}: {found}"
        raise ConfigurationError(text) from None


def api_keys(settings: Settings, environ: Mapping[str, str]) -> list[str]:
    """From the file and the environment. Raises ConfigurationError for a file that holds none."""
    keys = [key.strip() for key in environ.get(KEYS_VARIABLE, "").split(",")]
    if settings.api_key_file:
        try:
            lines = read_text(settings.api_key_file).splitlines()
        except FileError as error:
            raise ConfigurationError(f"api_key_file = {error}") from error
        if not any(line.strip() for line in lines):
            raise ConfigurationError(f"api_key_file = {settings.api_key_file}: holds no key; write one a line")
        keys += [line.strip() for line in lines]
    return [key for key in keys if key]


def _shown(value: Any) -> str:
    """As a flag takes it."""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(value) if isinstance(value, tuple | list) else str(value)
