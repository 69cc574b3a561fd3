"""`rocline bench page`: figures of made-up lines on the page and in its picture, and what is refused."""

import json
import xml.etree.ElementTree as ET

import pytest

from rocline.tools import bench_forecast, bench_page, cli

GIB = 1 << 30
HASH, OTHER = "a" * 64, "b" * 64
LABELS = {
    "rocline_bench": "engine",
    "weights": "synthetic:1, stores=12",
    "commit": "0123456789abcdef+",
    "seed": 42,
    "device": "card",
    "torch": "2",
    "stages": 8,
    "prefill": "halo",
    "chunk_rows": 1024,
    "devices": 1,
    "arena_bytes": [GIB // 2] * 8,
}
MEMORY = {
    "peak_bytes": [100 * GIB, 120 * GIB],
    "least_headroom_bytes": 19 * GIB,
    "device_allocs": {"driver": 0, "torch": None, "card_bytes_fallen": 2048},
    "arena_high_water_bytes": [1] * 8,
    "busy_s": [1.0] * 8,
}
STEP = {"rows": 4, "experts_a_layer": 23.5, "weight_bytes": 20_000_000_000}
OPENED = LABELS | {"line": "opened", "seconds": 9.0, "command": "rocline bench engine --prefill 4096", "settings": {}}


def prefill(n_tokens, seconds, output_sha256=HASH, **labels):
    figures = {"prompt_tokens": n_tokens, "seconds": seconds, "tokens_s": n_tokens / seconds}
    return LABELS | labels | {"line": "prefill", "output_sha256": output_sha256} | figures | MEMORY


def rows(n_tokens, n_rows, seconds, **labels):
    return LABELS | labels | {"line": "rows", "prompt_tokens": n_tokens, "rows": n_rows, "seconds": seconds}


def decode(n_streams, rate):
    figures = {"streams": n_streams, "context": 4096, "output_tokens": 128, "seconds": 2.0, "tokens_s": rate}
    return LABELS | {"line": "decode", "output_sha256": HASH, "modelled_a_step": STEP} | figures | MEMORY


@pytest.fixture
def write(tmp_path, monkeypatch, capsys):
    """write(lines...): (exit status, the page or None, stderr); the picture is beside it."""
    monkeypatch.setattr(bench_page, "forecast", lambda: "A forecast.")
    out = tmp_path / "results.md"

    def run(*lines):
        file = tmp_path / "lines.jsonl"
        file.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
        status = cli.main(["bench", "page", "--in", str(file), "--out", str(out)])
        return status, out.read_text() if out.exists() else None, capsys.readouterr().err

    return run


def table(page, *cells):
    """The one row of the page that begins with these cells."""
    found = [line for line in page.splitlines() if line.startswith(f"| {' | '.join(cells)} |")]
    assert len(found) == 1, found
    return [cell.strip() for cell in found[0].strip("|").split("|")]


def test_results_beside_the_published_figures(write):
    status, page, _ = write(OPENED, decode(1, 61.5), prefill(261_933, 50.0), prefill(300, 2.0, OTHER))
    assert status == 0
    assert "another scale; not a speed-up claim" in page
    assert table(page, "261,933-token cold prefill, `halo`") == [
        *("261,933-token cold prefill, `halo`", "1,553.91", "5,238.66", "50.00", "synthetic:1, stores=12"),
        *("`012345678+`", "42", "8", "1", "1,024", "4.00", "120.00", "19.00", "0 / - / 2,048", "`aaaaaaaaaaaa`"),
    ]
    assert table(page, "decode, one request, 4,096 tokens before", "26 with drafts")[2] == "61.50"
    assert table(page, "300-token cold prefill, `halo`", "")[2] == "150.00"
    for missing in ("261,933-token cold prefill, `full`", "decode, eight requests"):
        assert table(page, missing)[2:] == ["not measured", *[""] * 12]
    assert table(page, "decode, one request, 4,096 tokens before", "1,024")[3:] == ["4", "23.5", "20.00", "0.31"]
    assert "A forecast." in page
    assert "rocline bench engine --prefill 4096\nrocline bench page --in lines.jsonl --out results.md" in page


def test_a_run_that_was_cut_off_keeps_its_curve(write, tmp_path):
    cut = [rows(1_000_411, n * 32_768, n * 10.0) for n in (1, 2, 3)]
    whole = [rows(4096, 2048, 1.0), prefill(4096, 3.0)]
    status, page, _ = write("a script's words\n", OPENED, *whole, *cut, '{"rocline_bench": "eng')
    assert status == 0
    assert table(page, "1,000,411-token cold prefill, `halo`")[2] == "cut off: 3,276.80 over its first 98,304 rows"
    assert "(results-rate.svg)" in page
    svg = ET.parse(tmp_path / "results-rate.svg").getroot()
    tips = [tip.text for tip in svg.iter("{http://www.w3.org/2000/svg}title")]
    assert len(tips) == 5
    assert any("98,304 rows after 30.00 s, 3,277 rows/s" in tip for tip in tips)
    open_ends = [c for c in svg.iter("{http://www.w3.org/2000/svg}circle") if c.get("fill") == "#fff"]
    assert len(open_ends) == 1


def test_sizes_of_chunks_have_a_table(write):
    lines = [prefill(4096, 4096 / rate, chunk_rows=chunk) for chunk, rate in ((2048, 500), (256, 100), (1024, 400))]
    status, page, _ = write(*lines, prefill(4096, 9.0, prefill="full"))
    assert status == 0
    swept = page.split("## Chunk size")[1].split("## ")[0]
    assert [line.split(" | ")[:2] for line in swept.splitlines() if line.startswith("| ")][2:] == [
        ["| 256", "100.00"],
        ["| 1,024", "400.00"],
        ["| 2,048", "500.00"],
    ]
    assert table(page, "4,096-token cold prefill, `full`")  # alone in its mode: no sweep
    assert "4 of the results had to have another one's hash" in page.replace("\n", " ")


@pytest.mark.parametrize("other", [{"chunk_rows": 256}, {"prefill": "full"}, {"stages": 1}, {"devices": 2}, {}])
def test_answers_that_must_be_alike_and_are_not(write, other):
    status, page, err = write(prefill(4096, 2.0), prefill(4096, 2.0, OTHER, **other))
    assert (status, page) == (3, None)
    assert HASH in err
    assert OTHER in err


@pytest.mark.parametrize(
    "other", [{"seed": 7}, {"commit": "1"}, {"weights": "synthetic:2, stores=12"}, {"device": "another"}]
)
def test_answers_that_may_differ(write, other):
    assert write(prefill(4096, 2.0), prefill(4096, 2.0, OTHER, **other))[0] == 0


def test_a_profile_has_its_kernels_and_bounds(write):
    summary = {"line": "profile", "profile": "decode of 1", "wall_ms": 50.0, "busy_ms": 40.0, "launches": 300}
    kernels = [
        {"line": "kernel", "kernel": f"k{n}", "ms": 10.0 + n, "share": 0.03, "launches": 10, "mean_us": 1e3}
        for n in range(30)
    ]
    bound = {"line": "bound", "what": "experts", "ms": 20.0, "bound_ms": 9.0, "bound_by": "bytes", "of_bound": 0.45}
    idle = [{"after": f"k{n}", "before": "copy", "ms": 9.0 - n, "times": 3, "mean_us": 1e3 / 3} for n in range(9)]
    idle = [{"line": "idle"} | line for line in idle]
    copies = {"line": "copies", "copies": "Memcpy PtoP", "ms": 8.0, "times": 1234, "hidden_ms": 6.0}
    ceilings = {"line": "ceilings", "copy_bytes_s": 4.1e12, "bf16_flops_s": 7e14}
    lines = [LABELS | line for line in (ceilings, summary, *kernels, copies, *idle, bound)]
    status, page, _ = write(decode(1, 60.0), *lines)
    assert status == 0
    assert "## Kernels: decode of 1" in page
    assert table(page, "`k29`") == ["`k29`", "39.00", "3.0%", "10", "1,000.0"]
    assert table(page, "6 others") == ["6 others", "75.00", "18.0%", "60", "1,250.0"]
    assert table(page, "Memcpy PtoP") == ["Memcpy PtoP", "8.00", "1,234", "75%"]
    assert page.count("`copy`") == 8  # of nine
    assert "| `k0` | `copy` | 9.00 | 3 | 333.3 |" in page
    assert table(page, "experts") == ["experts", "20.00", "9.00", "bytes", "0.45"]
    assert "4.10 TB/s" in page


def test_failures_are_on_the_page(write):
    failed = LABELS | {"line": "failed", "what": "opening", "why": "PlacementError: no room", "chunk_rows": 4096}
    _, page, _ = write(prefill(4096, 2.0), failed)
    assert "Failed, chunks of 4,096 rows: opening: PlacementError: no room" in page.replace("\n", " ")


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ([OPENED], "no results"),
        (["words\n", "more words\n"], "no results"),
        (['{"rocline\n', prefill(4096, 2.0)], "line 1 is no JSON"),
        ([{"rocline_bench": 1}, prefill(4096, 2.0)], "line 1 is not of rocline bench engine"),
    ],
)
def test_what_is_no_result(write, lines, why):
    status, page, err = write(*lines)
    assert (status, page) == (2, None)
    assert why in err


def test_files_that_cannot_be_read_or_written(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(bench_page, "forecast", lambda: "A forecast.")
    lines = tmp_path / "lines.jsonl"
    lines.write_text(json.dumps(prefill(4096, 2.0)))
    for words in (
        ["--in", "nowhere", "--out", "page.md"],
        ["--in", str(lines), "--out", str(tmp_path / "no" / "p.md")],
    ):
        assert cli.main(["bench", "page", *words]) == 2
        assert "No such file" in capsys.readouterr().err


def test_the_forecast_is_a_range_and_says_that_it_is_modelled():
    text = bench_forecast.forecast()
    assert text.startswith("**Modelled, not measured:**")
    for words in ("261,933 tokens at", "1,000,411 tokens at", "8 together", "Nothing was measured on such cards"):
        assert words in text


def test_routing_is_shown_where_it_was_counted(write):
    counted = {"rows": 1024, "layers": 40, "most_over_mean": {"worst": 2.345, "median": 1.5}}
    line = LABELS | {"line": "routing", "experts_a_layer": {"1": 6, "8": 45.25, "1024": 380}} | counted
    status, page, _ = write(OPENED, decode(1, 50.0), line, line | {"chunk_rows": 2048})
    assert status == 0
    assert page.count("| synthetic:1, stores=12 | 1,024 | 2.35 | 1.50 | 6.00 | 45.25 | 380.00 |") == 1
    assert "## Routing" not in write(OPENED, decode(1, 50.0))[1]


def test_products_are_counted_of_the_published_prefills(write):
    ceilings = LABELS | {"line": "ceilings", "copy_bytes_s": 4e12, "bf16_flops_s": 800e12}
    _, page, _ = write(ceilings, OPENED, prefill(261_933, 23.733), prefill(4096, 1.0))
    told = " ".join(page.split())
    assert "261,933-token cold prefill, `halo` 210 TFLOP/s, 0.26 of that rate." in told
    assert told.count("of that rate") == 1


def test_two_cards_have_twice_the_rate_to_reach(write):
    ceilings = LABELS | {"line": "ceilings", "copy_bytes_s": 4.1e12, "bf16_flops_s": 8e14}
    _, page, _ = write(ceilings, prefill(261_933, 23.73), prefill(261_933, 23.73, devices=2))
    told = page.replace("\n", " ")
    assert "261,933-token cold prefill, `halo` 210 TFLOP/s, 0.26 of that rate" in told
    assert "261,933-token cold prefill, `halo` on 2 cards 210 TFLOP/s, 0.13 of that rate" in told
