"""Rungs on the cards and on files: kernels, operators' tests, golden data, shards. No weights are loaded."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

from rocline.engine.config import ModelConfig
from rocline.engine.release import release_config
from rocline.hip_kernels.device_ops import KERNELS
from rocline.tools import doctor_disk, doctor_live, doctor_software
from rocline.tools.bootstrap import ROOT
from rocline.tools.bring_up_site import Site
from rocline.tools.conform import check_model, conform
from rocline.tools.doctor_checks import Card, Check
from rocline.tools.golden_report import Finding

RELEASE_SHARDS = 48
SHOWN = 5
TESTS, DATA = ROOT / "tests" / "hip_kernels", ROOT / "tests" / "data" / "golden"
DOUBLE_TESTS = "test_rows_hip.py"  # of the double of HIP, whose own CI runs the others


def kernel(site: Site) -> Check:
    """One kernel a card; without cards the arithmetic that all references rest on."""
    return doctor_live.kernel(site.found) if site.found.cards else doctor_software.arithmetic()


def copies(site: Site) -> Check:
    return doctor_live.peer_copies(site.found)


# -- operators ---------------------------------------------------------------------------------------------------


def operators(site: Site) -> Check:
    """The tests of all kernels against their references, on each card by itself, where the tests are."""
    it = Check("operators")
    if not site.found.cards:
        it.not_applicable("no card: on the host every operator is its reference")
    elif not TESTS.is_dir():
        it.not_applicable(f"not run: no tests/hip_kernels in {ROOT}; an installed package has none, a checkout does")
    elif not importlib.util.find_spec("pytest"):
        it.not_applicable("not run: no pytest; pip install -e '.[test]' brings it")
    else:
        for card in site.found.cards[:1] if site.is_double else site.found.cards:
            if not _test(it, card):
                break
    return it


def _test(it: Check, card: Card) -> bool:
    """Run the tests where this card is the only one; whether all passed."""
    where = "rocm" if card.arch.startswith("gfx") else "cpu" if card.is_host else "cuda"
    path = TESTS / DOUBLE_TESTS if card.is_host else TESTS
    words = [sys.executable, "-m", "pytest", "-q", "--hip", where, str(path.relative_to(ROOT))]
    environ = os.environ | _only(card)
    failed, last = [], ""
    process = subprocess.Popen(
        words, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        assert process.stdout
        for line in process.stdout:
            print(f"  {card}: {line}", end="", file=sys.stderr, flush=True)
            failed += [line.split()[1]] if line.startswith(("FAILED ", "ERROR ")) else []
            last = line.strip(" =\n") or last
        status = process.wait()
    finally:
        process.kill()
        process.wait()
    it.values[str(card)] = {"status": status, "failed": failed, "last": last}
    ran = f"{card}, pytest {path.relative_to(ROOT)} --hip {where}: {last}"
    if status == 0:
        it.ok(ran)
        return True
    files = Counter(name.partition("::")[0].rpartition("/")[2] for name in failed)
    names = ", ".join(failed[:SHOWN]) + (f" and {len(failed) - SHOWN} more" if len(failed) > SHOWN else "")
    advice = (
        f"run one by itself: HIP_VISIBLE_DEVICES={_visible(card)} pytest --hip {where} '{failed[0]}'; until its kernel "
        f"is right climb on with --from golden --reference-op and its operator, here one of {_operators(files)}"
        if failed
        else "see the lines above: the tests did not even start"
    )
    it.problem(f"{ran}. {names or f'exit status {status}'}", advice)
    return False


def _only(card: Card) -> dict[str, str]:
    """The environment in which this card is the only one."""
    name = "HIP_VISIBLE_DEVICES" if card.arch.startswith("gfx") else "CUDA_VISIBLE_DEVICES"
    return {} if card.is_host else {name: _visible(card)}


def _visible(card: Card) -> str:
    """What HIP_VISIBLE_DEVICES calls the card, where it hides some already."""
    shown = [word for word in os.environ.get("HIP_VISIBLE_DEVICES", "").split(",") if word]
    return shown[card.index] if card.index < len(shown) else str(card.index)


def _operators(files: Counter[str]) -> str:
    """Operators whose names those of the failing files have in them, the most failing first."""
    stems = [file.removeprefix("test_").removesuffix(".py").removesuffix("_hip") for file, _ in files.most_common()]
    named = [name for stem in stems for name in KERNELS if stem.rstrip("s") in name or name in stem]
    return ", ".join(dict.fromkeys(named)) or "docs/bring-up.md, operators, lists them"


# -- golden data -------------------------------------------------------------------------------------------------


def golden(site: Site) -> Check:
    """`rocline conform` on the committed data, and on more where there is some."""
    it = Check("golden")
    folders = [folder for folder in (DATA, site.golden) if folder and folder.is_dir()]
    if site.golden and site.golden not in folders:
        it.problem(f"ROCLINE_GOLDEN={site.golden}: no such folder", "unset it, or name the folder of the golden data")
    if not folders:
        it.not_applicable(f"not run: no {DATA.relative_to(ROOT)} in {ROOT}, and ROCLINE_GOLDEN names no folder")
    for folder in folders:
        _conform(it, site, folder)
    return it


def _conform(it: Check, site: Site, folder: Path) -> None:
    findings: list[Finding] = []
    place = folder.relative_to(ROOT) if folder.is_relative_to(ROOT) else folder
    command = f"rocline conform {place} --device {site.options.device}"
    if site.is_double:
        command += ", traces alone: a double of HIP is slow"
        for model in sorted(path.parent for path in folder.glob("*/trace.safetensors")):
            check_model(model, findings.append, ("trace",), "hip", site.options.reference_op)
    else:
        conform(folder, findings.append, site.options.device, site.options.reference_op)
    counts = Counter(finding.verdict for finding in findings)
    it.values[str(folder)] = dict(counts)
    said = ", ".join(f"{n} {verdict}" for verdict, n in counts.items())
    failed = [finding for finding in findings if finding.verdict == "failed"]
    if not failed:
        it.ok(f"{command}: {said}")
        return
    worst = "; ".join(
        f"{f.folder} {f.item}: {f.worst:.3g} {f.measure}, limit {f.bound} {f.limit:.3g} {f.where} {f.note}".strip()
        if f.worst is not None and f.limit is not None
        else f"{f.folder} {f.item}: {f.note}"
        for f in failed[:SHOWN]
    )
    advice = (
        "the first failing item of `trace operator` names the operator; repeat the command with --reference-op and it: "
        "if that passes, its kernel is wrong. docs/bring-up.md, golden, says which item means which operator"
    )
    it.problem(f"{command}: {said}. {worst}", advice)


# -- shards ------------------------------------------------------------------------------------------------------


def shards(site: Site) -> Check:
    """Headers and sizes of all shards, how many there are, whether the model is the release, and the disk's speed."""
    it = doctor_disk.checkpoint(site.folder, site.config)
    if it.verdict == "problem":
        return it
    n_files, differences = it.values["files"], _differences(site.config)
    if not site.is_release:
        it.ok(f"another model than the release: of other {', '.join(differences)}")
    elif differences:
        it.warning(
            f"the release's tensors with another config.json: {', '.join(differences)}",
            "get the release's config.json, unless you mean it",
        )
    if site.is_release and n_files != RELEASE_SHARDS:
        it.problem(
            f"{n_files} shards: the release has {RELEASE_SHARDS}",
            "every header fits, so this is a copy that was split anew: get the release's own files",
        )
    disk = doctor_disk.disk(site.folder)
    it.entries += disk.entries
    it.values["disk"] = disk.values
    if disk.values.get("read_bytes", 0) >= doctor_disk.LEAST_BYTES:
        site.disk_bytes_per_s = disk.values["bytes_per_s"]
    return it


def _differences(config: ModelConfig) -> list[str]:
    """Fields of the configuration that are other than the release's, the text model's first."""
    release = release_config()
    names = [name for name in vars(release) if name != "text_config" and getattr(config, name) != vars(release)[name]]
    text, theirs = config.text_config, release.text_config
    names = [name for name in theirs.__dataclass_fields__ if getattr(text, name) != getattr(theirs, name)] + names
    return names[:SHOWN] + ([f"and {len(names) - SHOWN} more"] if len(names) > SHOWN else [])
