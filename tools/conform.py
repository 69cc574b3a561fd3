"""`rocline conform`: this build against a folder of golden data, one line an item.

Operator tables and layer traces are the main evidence, logits the weak one; each has a file here,
golden_ops.py, golden_trace.py, golden_decode.py and golden_model.py.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer

from rocline.engine.checkpoint import CheckpointError
from rocline.engine.config import ConfigError
from rocline.engine.engram import compressed_id_map
from rocline.engine.home import DeviceKind
from rocline.engine.model import Model
from rocline.tools.device import DEVICE_ERRORS, add_device_options, check_device_options
from rocline.tools.files import explained
from rocline.tools.golden_decode import check_decode
from rocline.tools.golden_file import read_golden
from rocline.tools.golden_limits import MODEL_LIMITS
from rocline.tools.golden_model import check_long, check_prefill
from rocline.tools.golden_ops import FILE as OPS_FILE
from rocline.tools.golden_ops import check_ops
from rocline.tools.golden_report import Finding, Findings
from rocline.tools.golden_trace import check_trace

PARTS = ("trace", "prefill", "decode", "long")  # of a text model's folder; each a file, the sharpest first
NOT_READ = {
    "rounds.safetensors": "this build has no draft head",
    "tower.safetensors": "this build has no vision tower",
}
KV_TOKENS, PAGE_POSITIONS = 32768, 512  # every prompt at once; small pages, so that lists cross their ends


class GoldenError(Exception):
    """A folder that is not golden data, or not whole."""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "conform",
        description="Check this build against golden data, one line an item: exact, within its tolerance, or failed. "
        "Exit status 0: no item failed, 1: one or more did, 2: wrong input.",
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the golden data, or the folder of one model in it")
    add_device_options(parser)
    parser.add_argument(
        "--json", action="store_true", help="print a JSON object for each item, one a line, instead of the table"
    )


def run(args: argparse.Namespace) -> int:
    counts: Counter[str] = Counter()

    def tell(finding: Finding) -> None:
        counts[finding.verdict] += 1
        print(json.dumps(finding.row()) if args.json else _line(finding), flush=True)

    try:
        check_device_options(args)
        conform(args.folder, tell, args.device, args.reference_op)
    except (GoldenError, ConfigError, CheckpointError, SafetensorError, OSError, *DEVICE_ERRORS) as error:
        print(f"conform: {explained(error)}", file=sys.stderr)
        return 2
    print("conform: " + ", ".join(f"{n} {verdict}" for verdict, n in counts.items()), file=sys.stderr)
    return 1 if counts["failed"] else 0


def conform(
    folder: Path,
    tell: Callable[[Finding], None],
    device: DeviceKind = "cpu",
    reference_ops: Collection[str] = (),
) -> None:
    """Check a golden folder: its operator tables and every model in it, or the one model that it is.

    The tables are of the torch references and checked on the CPU alone. device, reference_ops: as in Model.load.

    Raises GoldenError where there is nothing to check or a listed file is missing, and what the
    checkpoint raises.
    """
    if not folder.is_dir():
        raise GoldenError(f"{folder}: no such folder; name one that holds {OPS_FILE}, or <model>/manifest.json")
    if reason := _not_read(folder):
        raise GoldenError(f"{folder}: not read, {reason}")
    if (folder / "manifest.json").is_file():
        check_model(folder, tell, PARTS, device, reference_ops)
        return
    models = sorted(path.parent for path in folder.glob("*/model") if path.is_dir())
    others = sorted(path.parent for name in NOT_READ for path in folder.glob(f"*/{name}"))
    if not (folder / OPS_FILE).is_file() and all(_not_read(path) for path in models):
        raise GoldenError(f"{folder}: no golden data; looked for {OPS_FILE} and <model>/manifest.json")
    if (folder / OPS_FILE).is_file():
        if device == "cpu":
            _say("operator tables")
            check_ops(folder / OPS_FILE, Findings("ops", tell))
        else:
            Findings("ops", tell).not_read("all", "tables of the torch references: checked with --device cpu")
    for path in sorted({*models, *others}):
        if reason := _not_read(path):
            Findings(path.name, tell).not_read("all", reason)
        else:
            check_model(path, tell, PARTS, device, reference_ops)


def check_model(
    folder: Path,
    tell: Callable[[Finding], None],
    parts: Collection[str] = PARTS,
    device: DeviceKind = "cpu",
    reference_ops: Collection[str] = (),
) -> None:
    """Check one model's folder; `parts` leaves files out, and the n-gram maps are always checked."""
    manifest = _manifest(folder)
    name = manifest["config"]
    if name not in MODEL_LIMITS:
        raise GoldenError(
            f"{folder}: no limits are known for configuration {name!r}, only for {', '.join(MODEL_LIMITS)}"
        )
    limits, find = MODEL_LIMITS[name], Findings(name, tell, on_host=device == "cpu")
    options: dict[str, Any] = {"kv_tokens": KV_TOKENS, "page_positions": PAGE_POSITIONS}
    model = Model.load(folder / "model", device=device, reference_ops=reference_ops, **options)
    _say(f"{name}: {model.home}")
    _check_maps(model, folder, find)
    for part in PARTS:
        if part not in parts or f"{part}.safetensors" not in manifest["files"]:
            continue
        _say(f"{name}: {part}")
        tensors = read_golden(folder / f"{part}.safetensors")
        if part == "trace":
            check_trace(model, tensors, find)
        elif part == "prefill":
            check_prefill(model, tensors, limits, find)
        elif part == "long":
            check_long(model, tensors, limits, find)
        else:
            slot_model = Model(model.config, model.weights, shared_key_slot=True, home=model.home, **options)
            check_decode(model, slot_model, tensors, limits, find)


def _check_maps(model: Model, folder: Path, find: Findings) -> None:
    """Compressed token ids and the hash of every Engram table, as the data has them."""
    with np.load(folder / "engram_map.npz") as recorded:
        want = {name: torch.from_numpy(np.asarray(recorded[name])) for name in recorded.files}
    tables = model.config.text_config.engram_tables
    id_map = compressed_id_map(Tokenizer.from_file(str(folder / "model" / "tokenizer.json")))
    pad = id_map[model.config.text_config.engram_pad_token_id]
    find.same("engram map", torch.from_numpy(id_map), want["map"])
    find.same("engram compressed ids", torch.tensor(int(id_map.max()) + 1), want["compressed_vocab_size"])
    find.same("engram pad", torch.tensor(int(pad)), want["pad_id"])
    find.same("engram primes", torch.tensor([table.primes for table in tables]), want["primes"].flatten(1))
    find.same("engram multipliers", torch.tensor([table.multipliers for table in tables]), want["multipliers"])


def _manifest(folder: Path) -> dict[str, Any]:
    """The folder's manifest, all of whose files are there."""
    path = folder / "manifest.json"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        listed = [*manifest["files"], "engram_map.npz"]
        _ = manifest["config"]
    except (ValueError, KeyError, TypeError) as error:
        raise GoldenError(f"{path}: not a manifest of golden data; get the folder again") from error
    if missing := [name for name in listed if not (folder / name).is_file()]:
        raise GoldenError(f"{path}: lists files that are missing: {', '.join(missing)}")
    return manifest


def _not_read(folder: Path) -> str:
    """Why this build reads nothing of a folder, or ""."""
    return next((reason for name, reason in NOT_READ.items() if (folder / name).exists()), "")


def _say(what: str) -> None:
    print(f"conform: {time.strftime('%H:%M:%S')} {what}", file=sys.stderr)


def _line(finding: Finding) -> str:
    figure = ""
    if finding.worst is not None:
        figure = f"{finding.worst:.3g}"
        if finding.limit is not None:
            figure += f" {finding.bound} {finding.limit:.3g}"
    rest = "  ".join(text for text in (figure, finding.measure, finding.where, finding.note) if text)
    return f"{finding.folder:6}  {finding.verdict:11}  {finding.item:46}  {rest}".rstrip()
