"""The options of commands that open an engine themselves, settled as `rocline serve` settles its own."""

from __future__ import annotations

import argparse
import os
from dataclasses import fields, replace
from typing import Any

from rocline.engine.config import ModelConfig
from rocline.pipeline.options import Options
from rocline.tools.device import add_device_options, check_device_options
from rocline.tools.serve import ConfigurationError, build, check_context, configuration

NAMES = tuple(field.name for field in fields(Options))


def add_engine_options(parser: Any) -> None:
    """--device, --reference-op and --set for a parser or a group of one."""
    add_device_options(parser)
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        type=_setting,
        metavar="NAME=VALUE",
        help="a setting of the engine, as `rocline serve` knows them (stages=8, engram=mmap, ...); may be repeated",
    )


def _setting(word: str) -> tuple[str, str]:
    name, equals, value = word.partition("=")
    name = name.strip().replace("-", "_")
    if not equals or name not in NAMES:
        raise argparse.ArgumentTypeError(f"{word}: write NAME=VALUE with a name of {', '.join(NAMES)}")
    return name, value.strip()


def engine_options(args: Any, config: ModelConfig, **defaults: Any) -> Options:
    """From flags, then ROCLINE_*, then rocline.toml, then `defaults`, then Options' own.

    A command may have a flag of its own for chunk_rows. Without a word on stages there are no more than the model has
    layers. Raises ConfigurationError and DispatchError.
    """
    check_device_options(args)
    flags = {"model": str(args.model), "device": args.device, "reference_op": ",".join(args.reference_op)}
    flags["chunk_rows"] = getattr(args, "chunk_rows", None)
    values = configuration(flags, os.environ, None, dict(args.set))
    options: Options = build(values, Options)
    check_context(values, config)
    least = {"stages": min(options.stages, config.text_config.num_hidden_layers)}
    unsaid = {name: value for name, value in (least | defaults).items() if values[name].origin == "default"}
    try:
        return replace(options, **unsaid)
    except ValueError as error:
        raise ConfigurationError(str(error)) from None
