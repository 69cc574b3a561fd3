"""`rocline bench page`: docs/results.md from lines of `rocline bench engine`. Every figure on it is in the lines, or
says that it is modelled."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from rocline.engine.release import release_config
from rocline.engine.synthetic import seed_of
from rocline.pipeline.costs import CostModel
from rocline.tools.bench_curve import draw
from rocline.tools.bench_forecast import forecast
from rocline.tools.bench_lines import Curve, Line, Measured, Profile, name_of, read
from rocline.tools.files import FileError, explained
from rocline.tools.load_client import InputError
from rocline.tools.load_protocols import Talk

GIB = 1 << 30
KERNELS_SHOWN = 24
IDLE_SHOWN = 8
LINE = 120
NOT_MEASURED = "not measured"


class Published(NamedTuple):
    """A row of the published table, and the result it is shown beside."""

    name: str
    rate: str
    of: Callable[[Line], bool]


def _prefill(n_tokens: int, mode: str) -> Callable[[Line], bool]:
    return lambda line: line.get("prompt_tokens") == n_tokens and line["prefill"] == mode


def _decode(n_streams: int) -> Callable[[Line], bool]:
    return lambda line: line.get("streams") == n_streams


PUBLISHED = (
    Published("261,933-token cold prefill, `halo`", "1,553.91", _prefill(261_933, "halo")),
    Published("261,933-token cold prefill, `full`", "1,553.91", _prefill(261_933, "full")),
    Published("1,000,411-token cold prefill, `halo`", "732.59", _prefill(1_000_411, "halo")),
    Published("decode, one request", "26 with drafts", _decode(1)),
    Published("decode, eight requests", "109", _decode(8)),
)


def run(args: argparse.Namespace, talk: Talk) -> int:
    """Raises InputError for what cannot be read or written, and AnotherHash for answers that must be alike."""
    try:
        measured = read(args.files)
        n_alike = measured.check_hashes()
        curves = [curve for curve in measured.curves if len(curve.points) > 1]
        picture = args.out.with_name(f"{args.out.stem}-rate.svg")
        command = f"rocline bench page --in {' '.join(file.name for file in args.files)} --out {args.out.name}"
        if curves:
            picture.write_text(draw(curves), "utf-8")
        text = page(measured, n_alike, picture.name if curves else None, command, forecast())
        args.out.write_text(text, "utf-8")
    except (FileError, OSError) as error:
        raise InputError(explained(error)) from None
    talk.say(f"bench: {len(measured.results)} results on {args.out}")
    return 0


def page(measured: Measured, n_alike: int, picture: str | None, command: str, modelled: str) -> str:
    """In Markdown. picture: a file beside it."""
    sections = [
        "# Results",
        _about(measured, n_alike),
        _table(_RESULT_HEAD, _result_rows(measured)),
        *_notes(measured),
        *_sweeps(measured),
    ]
    if picture:
        sections += ["## Rate and length", _CURVE_TEXT, f"![rows a second against rows done]({picture})"]
    sections += [*_steps(measured), *_routing(measured)]
    for profile in measured.profiles:
        sections += _profile(profile)
    sections += ["## Eight cards", modelled, "## Commands", _COMMANDS_TEXT]
    sections.append("```\n" + "\n".join([*measured.commands, command]) + "\n```")
    return "\n\n".join(map(_wrapped, sections)) + "\n"


def _wrapped(section: str) -> str:
    """Prose in lines; tables, headings and pictures as they are."""
    is_prose = section[0] not in "|#!`"
    return textwrap.fill(section, LINE, break_long_words=False, break_on_hyphens=False) if is_prose else section


_CURVE_TEXT = (
    "Solid: all rows so far over the time since submit. Dashed: the rows since the point before. Rows are counted when "
    "they are through all layers that they run."
)
_COMMANDS_TEXT = "docs/bench.md has what each figure means. The lines came from the first, this page from the last:"


def _about(measured: Measured, n_alike: int) -> str:
    lines = [*measured.results, *(curve.labels for curve in measured.curves)]
    weights, cards = _each(lines, "weights"), _each(lines, "device")
    n_cards = sorted({line["devices"] for line in lines})
    text = (
        f"Complete requests through the engine's `submit`, profiler off. Weights: {weights}. Device: {cards}, "
        f"{' and '.join(map(str, n_cards))} of it. A prefill's seconds are from submit to the first id; a decode rate "
        "is of the time in which all streams decode. Peak: most bytes used on the fullest card while the request ran; "
        "headroom: the least that was free, ten looks a second. Allocations since the engine was ready: of our driver, "
        "of torch, and bytes by which a card's free memory has fallen."
    )
    if any(word.startswith("synthetic") for word in {line["weights"] for line in lines}):
        text += " Synthetic weights are noise of the release's sizes: times mean something, answers do not."
    if n_alike:
        text += f" {n_alike} of the results had to have another one's hash, and have it."
    return text


def _each(lines: Iterable[Line], name: str) -> str:
    return " and ".join(dict.fromkeys(str(line[name]) for line in lines))


_RESULT_HEAD = (
    "run",
    "published on 8 × W7900D (another scale; not a speed-up claim)",
    "token/s",
    "seconds",
    *(
        "weights",
        "commit",
        "seed",
        "stages",
        "cards",
        "chunk",
        "arena GiB",
        "peak GiB",
        "headroom GiB",
        "allocations",
        "output hash",
    ),
)


def _result_rows(measured: Measured) -> list[Sequence[str]]:
    """The published rows, also those that were not measured, and then all others but those of sweeps."""
    rows, shown = [], set[int]()
    for published in PUBLISHED:
        found = [line for line in measured.results if published.of(line)]
        shown |= {id(line) for line in found}
        rows += [_result_row(name_of(line), published.rate, line) for line in found]
        if not found:
            rows.append(_missing_row(published, measured.curves))
    swept = {id(line) for sweep in _swept(measured) for line in sweep}
    others = [line for line in measured.results if id(line) not in shown | swept]
    return rows + [_result_row(name_of(line), "", line) for line in others]


def _result_row(name: str, published: str, line: Line) -> Sequence[str]:
    return (name, published, f"{line['tokens_s']:,.2f}", f"{line['seconds']:,.2f}", *_circumstances(line))


def _circumstances(line: Line) -> Sequence[str]:
    return (
        *_origin(line),
        _gib(sum(line["arena_bytes"])),
        _gib(max(line["peak_bytes"], default=None)),
        _gib(line["least_headroom_bytes"]),
        _allocations(line["device_allocs"]),
        f"`{line['output_sha256'][:12]}`",
    )


def _origin(line: Line) -> Sequence[str]:
    numbers = str(line["seed"]), str(line["stages"]), str(line["devices"]), f"{line['chunk_rows']:,}"
    return (line["weights"], _commit(line), *numbers)


def _commit(line: Line) -> str:
    """With the + of a checkout that has changes."""
    commit = line["commit"] or "unknown"
    return f"`{commit[:9]}{'+' * commit.endswith('+')}`"


def _missing_row(published: Published, curves: Sequence[Curve]) -> Sequence[str]:
    """Of a run that nobody made, or that was cut off."""
    cut = [curve for curve in curves if not curve.whole and published.of(curve.labels)]
    if not cut:
        return (published.name, published.rate, NOT_MEASURED, *[""] * (len(_RESULT_HEAD) - 3))
    longest = max(cut, key=lambda curve: curve.points[-1][0])
    rows, seconds = longest.points[-1]
    rate = f"cut off: {rows / seconds:,.2f} over its first {rows:,} rows"
    return (published.name, published.rate, rate, f"{seconds:,.2f}", *_origin(longest.labels), *[""] * 5)


def _gib(n_bytes: int | None) -> str:
    return "" if n_bytes is None else f"{n_bytes / GIB:.2f}"


def _allocations(counts: dict[str, int | None]) -> str:
    shown = ["-" if counts[name] is None else f"{counts[name]:,}" for name in ("driver", "torch", "card_bytes_fallen")]
    return " / ".join(shown)


def _notes(measured: Measured) -> Iterable[str]:
    for line in measured.ceilings[:1]:
        yield (
            f"Ceilings, measured by the same command before the engine was opened: copies read and write "
            f"{line['copy_bytes_s'] / 1e12:.2f} TB/s, BF16 products of torch reach {line['bf16_flops_s'] / 1e12:,.0f} "
            "TFLOP/s."
        )
        if words := _of_ceiling(measured, line["bf16_flops_s"]):
            yield f"Of these products, **counted from the model**, not measured: {words}."
    for line in measured.failures:
        yield f"Failed, chunks of {line['chunk_rows']:,} rows: {line['what']}: {line['why']}"


def _of_ceiling(measured: Measured, flops_s: float) -> str:
    """The published prefills' products a second, of the release's sizes, which noise has."""
    model, parts = CostModel(release_config()), []
    for published in PUBLISHED:
        for line in filter(published.of, measured.results):
            if "prompt_tokens" in line and seed_of(line["weights"].partition(",")[0]) is not None:
                rate = model.prompt_flops(line["prompt_tokens"], line["prefill"]) / line["seconds"]
                cards = f" on {line['devices']} cards" * (line["devices"] > 1)
                share = f"{rate / flops_s / line['devices']:.2f}"
                parts.append(f"{published.name}{cards} {rate / 1e12:,.0f} TFLOP/s, {share} of that rate")
    return "; ".join(parts)


def _swept(measured: Measured) -> list[list[Line]]:
    """Prefills of one prompt over several sizes of chunks, the smallest first."""
    runs: dict[tuple[Any, ...], list[Line]] = {}
    for line in measured.results:
        if line["line"] == "decode":
            continue
        alike = ("weights", "commit", "seed", "device", "devices", "stages")
        runs.setdefault((name_of(line), *map(line.get, alike)), []).append(line)
    swept = [lines for lines in runs.values() if len({line["chunk_rows"] for line in lines}) > 1]
    return [sorted(lines, key=lambda line: line["chunk_rows"]) for lines in swept]


def _sweeps(measured: Measured) -> Iterable[str]:
    swept = _swept(measured)
    if not swept:
        return
    yield "## Chunk size"
    yield "A larger chunk fills kernels and takes memory; it changes no bit, and each run has one hash over all sizes."
    head = ("chunk", "token/s", "seconds", "arena GiB", "peak GiB", "least headroom GiB", "allocations", "output hash")
    for lines in swept:
        yield f"{name_of(lines[0])}, {lines[0]['stages']} stages, {lines[0]['weights']}:"
        rows = []
        for line in lines:
            *_, chunk = _origin(line)
            rest = _circumstances(line)[len(_origin(line)) :]
            rows.append((chunk, f"{line['tokens_s']:,.2f}", f"{line['seconds']:,.2f}", *rest))
        yield _table(head, rows)


def _steps(measured: Measured) -> Iterable[str]:
    lines = [line for line in measured.results if "modelled_a_step" in line]
    if not lines:
        return
    yield "## Decode steps"
    yield (
        "Token/s are measured. What a step reads is **modelled**: rows that choose their experts independently of each "
        "other, and every other weight once. The last column is bytes a step times steps a second."
    )
    rows = []
    for line in lines:
        step = line["modelled_a_step"]
        steps_s = line["tokens_s"] / step["rows"]
        read = f"{step['weight_bytes'] * steps_s / 1e12:.2f}"
        experts = f"{step['experts_a_layer']:g}"
        size = f"{step['weight_bytes'] / 1e9:.2f}"
        what = name_of(line), f"{line['chunk_rows']:,}", f"{line['tokens_s']:,.2f}"
        rows.append((*what, str(step["rows"]), experts, size, read))
    yield _table(("run", "chunk", "token/s", "rows a step", "experts a layer", "GB a step", "TB/s of weights"), rows)


def _routing(measured: Measured) -> Iterable[str]:
    if not measured.routings:
        return
    yield "## Routing"
    yield (
        "Counted: the experts that rows of one chunk of random ids chose. Over the mean: rows of a layer's busiest "
        "expert over those that it would have if all had as many. Distinct experts a layer are means over layers, of "
        "8 rows over groups of them too."
    )
    rows = []
    for line in measured.routings:
        over, read = line["most_over_mean"], line["experts_a_layer"]
        one, group, whole = (f"{n:.2f}" for n in read.values())
        shares = f"{over['worst']:.2f}", f"{over['median']:.2f}"
        rows.append((line["weights"], f"{line['rows']:,}", *shares, one, group, whole))
    head = "weights", "rows", "over the mean, worst layer", "median layer", "experts of 1 row", "of 8", "of all"
    yield _table(head, dict.fromkeys(rows))  # the size of chunks changes none


def _profile(profile: Profile) -> Iterable[str]:
    summary = profile.summary
    cards = f", {summary['devices']} cards" * (summary["devices"] > 1)
    yield f"## Kernels: {summary['profile']}{cards}"
    yield (
        f"Under the profiler, chunks of {summary['chunk_rows']:,} rows, {summary['stages']} stages, commit "
        f"{_commit(summary)}: {summary['wall_ms']:,.1f} ms, of which the device was busy "
        f"{summary['busy_ms']:,.1f}, with {summary['launches']:,} launches."
    )
    kernels = sorted(profile.kernels, key=lambda line: -line["ms"])
    shown, others = kernels[:KERNELS_SHOWN], kernels[KERNELS_SHOWN:]
    rows = [
        (f"`{k['kernel']}`", f"{k['ms']:,.2f}", f"{k['share']:.1%}", f"{k['launches']:,}", f"{k['mean_us']:,.1f}")
        for k in shown
    ]
    if others:
        ms, n = sum(k["ms"] for k in others), sum(k["launches"] for k in others)
        share = f"{sum(k['share'] for k in others):.1%}"
        rows.append((f"{len(others)} others", f"{ms:,.2f}", share, f"{n:,}", f"{1e3 * ms / n:,.1f}"))
    yield _table(("kernel", "ms", "share", "launches", "mean us"), rows)
    if profile.copies:
        yield "Copies, and how much of their time was hidden: their card computed too."
        copies = [
            (c["copies"], f"{c['ms']:,.2f}", f"{c['times']:,}", f"{c['hidden_ms'] / c['ms']:.0%}" if c["ms"] else "")
            for c in profile.copies
        ]
        yield _table(("copies", "ms", "times", "hidden"), copies)
    if profile.idle:
        yield "What the device had done last, and did next, when it had nothing to do for longest in all:"
        gaps = [
            (f"`{g['after']}`", f"`{g['before']}`", f"{g['ms']:,.2f}", f"{g['times']:,}", f"{g['mean_us']:,.1f}")
            for g in profile.idle[:IDLE_SHOWN]
        ]
        yield _table(("after", "before", "ms", "times", "mean us"), gaps)
    if profile.bounds:
        yield (
            "Of their bound: the time that the products take at torch's BF16 rate, or the weights at the rate of a "
            "copy, whichever is longer, over the time taken. What is counted is modelled, the rates are measured."
        )
        bounds = [
            (b["what"], f"{b['ms']:,.2f}", f"{b['bound_ms']:,.2f}", b["bound_by"], f"{b['of_bound']:.2f}")
            for b in profile.bounds
        ]
        yield _table(("kernels", "ms", "bound ms", "bound by", "of bound"), bounds)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
