"""The flags of `rocline bench engine`. Apart, because loading an engine takes seconds that the HTTP client has no use
for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rocline.tools.flags import positive_int


def add_engine(protocols: Any) -> None:
    parser = protocols.add_parser(
        "engine",
        help="time complete requests without HTTP, over a checkpoint or over noise of the release's sizes",
        description="Time complete requests through an engine's submit: streams that decode, then cold prefills. JSON "
        "lines go to stdout as they come, so that a run which is cut off keeps what it has. Exit status 0: done, 1: "
        "something failed, 2: wrong input, 3: another output, 130: interrupted.",
        epilog="docs/bench.md defines every figure.",
    )
    weights = parser.add_mutually_exclusive_group(required=True)
    weights.add_argument("--weights", metavar="synthetic:SEED", help="noise of the release's sizes")
    weights.add_argument("--model", metavar="FOLDER", help="a checkpoint")
    parser.add_argument("--stores", type=positive_int, metavar="N",
                        help="stores of synthetic experts; layer L has those of store L mod N (12)")  # fmt: skip
    parser.add_argument("--skewed", action="store_true", help="of the noise: some experts are chosen far more often")
    _add_requests(parser.add_argument_group("requests"))
    _add_engine_settings(parser.add_argument_group("engine"))
    parser.add_argument("--commit", metavar="SHA", help="commit that runs, where git does not tell")


def _add_requests(group: Any) -> None:
    group.add_argument("--decode", type=_numbers, default=[], metavar="N,N", help="streams that decode together")
    _number(group, "--decode-context", 4096, "tokens of each stream's prompt")
    _number(group, "--output-tokens", 128, "tokens that each stream decodes")
    group.add_argument("--prefill", type=_numbers, default=[], metavar="N,N", help="tokens of cold prefills")
    _number(group, "--report-rows", 32_768, "rows of a prefill from one line on the way to the next")
    group.add_argument("--seed", type=int, default=42, metavar="N", help="seed of all prompts (default %(default)s)")
    group.add_argument("--routing", type=positive_int, metavar="N",
                       help="count how N rows of one chunk spread over the experts")  # fmt: skip
    group.add_argument("--profile", action="store_true", help="run some of it again, for the time of each kernel")
    _number(group, "--profile-tokens", 16_384, "tokens of the prefill that is profiled, at most the longest one's")


def _add_engine_settings(group: Any) -> None:
    group.add_argument("--chunk-rows", type=_numbers, metavar="N,N",
                       help="sizes of chunks, one after another; all must give one hash")  # fmt: skip
    group.add_argument("--device", choices=("cpu", "hip"), default="cpu", help="where the layers run (default cpu)")
    group.add_argument("--reference-op", type=lambda names: names.split(","), default=[], metavar="NAME,NAME",
                       help="on a GPU, run these operators by their torch reference there")  # fmt: skip
    group.add_argument("--set", action="append", default=[], metavar="NAME=VALUE",
                       help="another setting of the engine, as in stages=8 or prefill=full; several times")  # fmt: skip


def add_page(protocols: Any) -> None:
    parser = protocols.add_parser(
        "page",
        help="write a page of results from lines of `rocline bench engine`",
        description="Write a page of results, in Markdown with its picture beside it, from lines of `rocline bench "
        "engine`. Exit status 0: written, 2: wrong input, 3: results with different outputs, no page.",
    )
    parser.add_argument("--in", dest="files", nargs="+", type=Path, required=True, metavar="FILE",
                        help="lines of one run or of several; - is stdin")  # fmt: skip
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.md", help="the page")


def _number(parser: Any, flag: str, default: int, text: str) -> None:
    parser.add_argument(flag, type=positive_int, default=default, metavar="N", help=f"{text} (default %(default)s)")


def _numbers(words: str) -> list[int]:
    return [positive_int(word) for word in words.split(",") if word]
