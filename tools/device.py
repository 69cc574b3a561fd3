"""The options that say where layers run, of every command that runs some."""

from __future__ import annotations

from typing import Any, get_args

from rocline.engine.home import DeviceKind
from rocline.hip_kernels.dispatch import DispatchError
from rocline.hip_kernels.runtime import HipError

DEVICE_ERRORS = (DispatchError, HipError)  # what opening a device may raise


def check_device_options(args: Any) -> None:
    """Raise DispatchError for options that say nothing together."""
    if args.reference_op and args.device == "cpu":
        raise DispatchError("--reference-op is for --device hip: on the host every operator is its reference")


def add_device_options(parser: Any) -> None:
    """--device and --reference-op for a parser or a group of one: args.device, args.reference_op."""
    parser.add_argument(
        "--device", choices=get_args(DeviceKind), default="cpu", help="where the layers run (default %(default)s)"
    )
    parser.add_argument(
        "--reference-op",
        type=lambda names: names.split(","),
        default=[],
        metavar="NAME[,NAME...]",
        help="on a GPU, run these operators by their torch reference there, loudly (default: none)",
    )
