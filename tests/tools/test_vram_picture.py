"""The picture of `rocline vram`: both minima, gaps, and as much as can be seen of however many looks."""

import re
import time
import xml.etree.ElementTree as ET

import pytest
from fake_sysfs import GIB, FakeSysfs

from rocline.pipeline.card_watch import CardWatch
from rocline.pipeline.sysfs_cards import cards
from rocline.tools import vram_picture
from rocline.tools.vram_picture import Curve, draw

TOTAL = 48 * GIB


def test_the_picture_marks_both_minima(tmp_path):
    sysfs = FakeSysfs(tmp_path / "sys")
    card = sysfs.add(total_bytes=TOTAL)
    watch, curve = CardWatch(cards(sysfs.root)[0], GIB, print), Curve()
    for at_s, free_gib in ((0, 5), (2, 2.5), (5, 4), (7, 6)):
        card.use(TOTAL - free_gib * GIB)
        curve.add(at_s, watch.look(at_s).free_bytes)
    picture = draw([watch], [curve], began_s := time.time(), 7.0)
    root = ET.fromstring(picture)
    texts = ["".join(text.itertext()) for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert f"2.500 GiB at {vram_picture.clock(began_s + 2)}" in texts
    assert f"4.000 GiB at {vram_picture.clock(began_s + 5)}" in texts
    assert {"0000:03:00.0 (card0), 48.00 GiB", "floor 1.00", "0 GiB"} <= set(texts)
    assert "not read" not in texts
    (line,) = root.iter("{http://www.w3.org/2000/svg}polyline")
    xs, ys = zip(*(map(float, point.split(",")) for point in line.get("points").split()), strict=True)
    assert xs[0] == pytest.approx(vram_picture._LEFT)
    assert xs[-1] == pytest.approx(vram_picture._LEFT + vram_picture._WIDTH)
    assert ys[1] == max(ys)  # the least free is lowest


def test_a_curve_keeps_the_extremes_whatever_its_length(rng, monkeypatch):
    monkeypatch.setattr(vram_picture, "MOST_BUCKETS", 50)
    curve, at_s, looks = Curve(), 0.0, []
    for _ in range(5000):
        at_s += float(rng.exponential(0.1))
        looks.append(int(rng.integers(0, 1 << 30)))
        curve.add(at_s, looks[-1])
        assert len(curve.buckets) <= 50
    assert min(bucket.low_bytes for bucket in curve.buckets) == min(looks)
    assert max(bucket.high_bytes for bucket in curve.buckets) == max(looks)
    assert len(curve.buckets) >= 20
    times = [bucket.at_s for bucket in curve.buckets]
    assert times == sorted(times)


def test_a_card_that_could_not_be_read_leaves_a_gap():
    curve = Curve()
    for at_s, free_bytes in enumerate([5, 6, None, None, 7, None]):
        curve.add(float(at_s), free_bytes)
    pieces = vram_picture._pieces(curve)
    assert [[bucket.at_s for bucket in piece] for piece in pieces] == [[0, 1], [4]]
    scale = vram_picture._Scale(span_s=5.0, most_bytes=10, top=0)
    gaps = [gap for gap in vram_picture._gaps(pieces, curve.is_lost, scale) if "rect" in gap]
    assert [float(re.search(r'width="([\d.]+)"', gap)[1]) for gap in gaps] == [600, 200]


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0"), (0.25, "0.25 s"), (59, "59 s"), (60, "1:00 min"), (3599, "59:59 min"), (7384, "2:03:04 h")],
)
def test_times_are_easy_to_read(seconds, shown):
    assert vram_picture._elapsed(seconds) == shown
