"""The picture of a sweep: every cell where its figures say, failed ones marked, and nothing outside its panel."""

import re
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest

from rocline.tools import tune_picture
from rocline.tools.tune_cells import GIB, Outcome, choose
from rocline.tools.tune_picture import draw
from rocline.tools.tune_report import Report

SVG = "{http://www.w3.org/2000/svg}"
CHUNKS, ARENAS = (256, 512, 1024, 2048, 4096), (2.0, 3.0)


def outcome(chunk_rows, arena_gib, rate=None, headroom_gib=None, note=""):
    return Outcome(
        chunk_rows=chunk_rows,
        arena_gib=arena_gib,
        status="failed" if rate is None else "done",
        note=note,
        ttft_s=None if rate is None else 1e5 / rate,
        prefill_tokens_per_s=rate,
        min_headroom_bytes={} if headroom_gib is None else {"3 0000:83:00.0": int(headroom_gib * GIB)},
        output_sha256=None if rate is None else "a" * 64,
    )


@pytest.fixture
def outcomes():
    cells = [outcome(c, a, 1000 + c / 4, 9 - a - c / 1000) for c in CHUNKS[:4] for a in ARENAS]
    return [*cells, *(outcome(4096, a, note='no room for "x" & <y>') for a in ARENAS)]


def panels(outcomes, floor_gib=1.5):
    """Of both: its frame, its points by colour (line, circles), crosses; and the picture's texts."""
    root = ET.fromstring(draw(outcomes, choose(outcomes, int(floor_gib * GIB)).outcome, int(floor_gib * GIB)))
    frames = [e for e in root.iter(SVG + "rect") if e.get("class") == "frame"]
    tops = [float(frame.get("y")) for frame in frames]
    ends = [*tops[1:], float(root.get("height"))]
    found = []
    for frame, top, end in zip(frames, tops, ends, strict=True):
        lines = [
            [tuple(map(float, point.split(","))) for point in line.get("points").split()]
            for line in root.iter(SVG + "polyline")
            if line.get("points") and top <= float(line.get("points").split()[0].split(",")[1]) < end
        ]
        crosses = [
            tuple(map(float, re.match(r"M([\d.]+) ([\d.]+)", path.get("d")).groups()))
            for path in root.iter(SVG + "path")
            if path.get("class") == "cross" and path.find(SVG + "title") is not None
        ]
        found.append((frame, lines, [at for at in crosses if top <= at[1] < end]))
    texts = ["".join(text.itertext()) for text in root.iter(SVG + "text")]
    return found, texts, root


def test_a_line_an_arena_in_both_panels(outcomes):
    found, texts, _ = panels(outcomes)
    assert len(found) == 2
    for frame, lines, crosses in found:
        left, top, width, height = (float(frame.get(name)) for name in ("x", "y", "width", "height"))
        assert [len(line) for line in lines] == [4, 4]
        for line in lines:
            assert all(left < x < left + width and top < y < top + height for x, y in line)
            assert all(after[0] - before[0] == pytest.approx(140, abs=0.2) for before, after in pairwise(line))
        assert len(crosses) == 2
        assert all(y > top + height for _, y in crosses)
        assert crosses[0][1] != crosses[1][1]
        assert min(x for x, _ in crosses) > max(x for line in lines for x, _ in line)
    assert {f"{chunk:,}" for chunk in CHUNKS} <= set(texts)
    assert {"arena 2 GiB", "arena 3 GiB", "recommended", "not done", "floor 1.5"} <= set(texts)


def test_values_are_to_scale(outcomes):
    (rate, headroom), _, root = panels(outcomes)
    for (frame, lines, _), values in (
        (rate, [[1000 + c / 4 for c in CHUNKS[:4]]] * 2),
        (headroom, [[9 - a - c / 1000 for c in CHUNKS[:4]] for a in ARENAS]),
    ):
        bottom = float(frame.get("y")) + float(frame.get("height"))
        per_unit = [
            (bottom - y) / value
            for line, of_line in zip(lines, values, strict=True)
            for (_, y), value in zip(line, of_line, strict=True)
        ]
        assert max(per_unit) == pytest.approx(min(per_unit), rel=0.01)  # coordinates have one decimal
    (chosen, _) = [e for e in root.iter(SVG + "circle") if e.get("class") == "chosen" and e.get("r") == "8"]
    assert (float(chosen.get("cx")), float(chosen.get("cy"))) == rate[1][0][3]  # chunk 2,048, arena 2: 4.95 GiB
    floor = next(e for e in root.iter(SVG + "path") if e.get("class") == "floor")
    at = float(re.match(r"M[\d.]+ ([\d.]+)", floor.get("d"))[1])
    frame = headroom[0]
    bottom = float(frame.get("y")) + float(frame.get("height"))
    assert (bottom - at) / 1.5 == pytest.approx((bottom - headroom[1][0][0][1]) / (9 - 2 - 0.256), rel=0.01)


def test_points_of_the_same_value_can_be_told_apart(outcomes):
    (_, lines, _), _ = panels(outcomes)[0]
    for one, other in zip(*lines, strict=True):
        assert other[0] - one[0] == pytest.approx(tune_picture._DODGE, abs=0.2)


@pytest.mark.parametrize("kept", [slice(0, 1), slice(8, 10), slice(0, 0), slice(1, 9)])
def test_whatever_there_is_can_be_drawn(outcomes, kept):
    some = outcomes[kept]
    if some:
        _, texts, root = panels(some)
        assert f"{some[0].chunk_rows:,}" in texts
        assert "NaN" not in ET.tostring(root, "unicode")
    report = Report(some, choose(some, GIB), "nothing", GIB, WORK, {"rocline": "1"}, ["rocline", "tune"])
    assert report.page().count("<tr") == 1 + len(some)


WORK = {"model": "/m", "prompt_tokens": 9, "output_tokens": 2, "seed": 1, "settings": {"stages": 8}}


def test_the_page_says_how_and_needs_nothing_else(outcomes):
    choice = choose(outcomes, int(1.5 * GIB))
    about = {"rocline": "0.1.0", "commit": "c0ffee", "python": "3.12"}
    page = Report(outcomes, choice, "", int(1.5 * GIB), WORK, about, ["rocline", "tune", "--model", "a b"]).page()
    assert "Recommended: chunk 2,048, arena 2 GiB: TTFT 66.14 s, 1,512.00 token/s" in page
    assert "rocline tune --model &#x27;a b&#x27;" in page
    for words in ("<dd>c0ffee</dd>", "<dd>0.1.0</dd>", "<dd>1.5 GiB</dd>", "failed: no room for &quot;x&quot; &amp;"):
        assert words in page
    assert page.count('class="chosen"') == 4  # a row, a ring in both panels, the legend's
    assert page.count('class="lost"') == 2
    assert not re.search(r"(src|href)=|url\(|@import|<script", page)
    links = re.findall(r"https?://[^\"]+", page)
    assert set(links) == {"http://www.w3.org/2000/svg"}
