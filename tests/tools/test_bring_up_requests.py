"""The rungs of rocline bring-up that ask a loaded model, here on the CPU: what they accept, and what they must not."""

from contextlib import nullcontext
from dataclasses import replace

import pytest

from rocline.engine.config import ModelConfig
from rocline.pipeline.options import Options
from rocline.pipeline.request import Summary
from rocline.tools import bring_up_requests
from rocline.tools.bring_up_requests import (
    LONG_OUTPUT_TOKENS,
    OUTPUT_TOKENS,
    Ran,
    long,
    past_candidates,
    perplexity,
    request,
)
from rocline.tools.bring_up_site import Site
from rocline.tools.doctor_checks import Cards

CONTEXT = 512


@pytest.fixture(scope="module")
def site(data_folder):
    folder = data_folder / "micro" / "model"
    options = Options(stages=2, context=CONTEXT, kv_tokens=4096, chunk_rows=16, mixed_chunk_rows=8, running=2)
    site = Site(folder, ModelConfig.load(folder), options, Cards())
    yield site
    site.close()


@pytest.fixture
def said():
    return lambda check: "\n".join(f"{entry.found} {entry.advice}" for entry in check.entries)


def test_load(site, said):
    check = bring_up_requests.load(site)
    assert check.verdict == "ok"
    assert check.values["stages"] == 2
    assert f"context {CONTEXT}" in said(check)


def test_one_request_three_ways(site, said):
    check = request(site, "request", 40)
    assert check.verdict == "ok"
    halo, full, mixed = check.values["runs"]
    assert len({run["logits_sha256"] for run in check.values["runs"]}) == 1
    assert (halo["chunk_rows"], full["chunk_rows"], mixed["chunk_rows"]) == (16, 16, 8)
    assert all(run["prompt_tokens"] == 40 and len(run["output_ids"]) == OUTPUT_TOKENS for run in check.values["runs"])
    assert "full and halo, chunks of 16 and 8 rows: one hash" in said(check)


@pytest.fixture
def told(site, monkeypatch):
    """told(*changes): what runs say from now on, one after the other: the same but for these."""

    def tell(*changes):
        summary = Summary("length", 40, 0, OUTPUT_TOKENS, 0, 0.0, 1.0, 2.0, 0, "0" * 64, "a" * 64)
        ran = Ran("halo", summary, [1] * OUTPUT_TOKENS, 16)
        left = iter([replace(ran, **change) for change in changes])
        monkeypatch.setattr(bring_up_requests, "run_prompt", lambda *args, **how: next(left))
        monkeypatch.setattr(bring_up_requests, "decoding", lambda site: nullcontext())

    return tell


SMALL = {"chunk_rows": 8}


def test_chunks_that_were_not_two_sizes(site, said, told):
    told({}, {}, {})
    check = request(site, "request", 40)
    assert check.verdict == "warning"
    assert "both went in chunks of 16" in said(check)


@pytest.mark.parametrize(("which", "words"), [(1, "full differs from halo"), (2, "chunks of 16 and 8 rows differ")])
@pytest.mark.parametrize("n_same", [3, OUTPUT_TOKENS])
def test_another_hash_fails(site, said, told, which, words, n_same):
    runs = [{}, {}, SMALL]
    ids = [1] * n_same + [0] * (OUTPUT_TOKENS - n_same)
    summary = Summary("length", 40, 0, OUTPUT_TOKENS, 0, 0.0, 1.0, 2.0, 0, "0" * 64, "f" * 64)
    runs[which] = runs[which] | {"summary": summary, "output_ids": ids}
    told(*runs)
    check = request(site, "request", 40)
    assert check.verdict == "problem"
    assert f"{words}: logits aaaaaaaaaaaaaaaa and ffffffffffffffff" in said(check)
    assert ("the tokens are the same" if n_same == OUTPUT_TOKENS else "the tokens differ from output 3 on") in said(
        check
    )
    assert "--reference-op" in said(check)


def test_past_the_candidates(site, said, told):
    told({}, {}, SMALL)
    check = past_candidates(site, 40)
    assert check.verdict == "ok"
    assert "8 positions more than the candidate blocks hold (32)" in said(check)


def test_no_room(site, said):
    assert request(site, "request", CONTEXT - OUTPUT_TOKENS + 1).verdict == "not applicable"
    assert long(site, "whole", CONTEXT).verdict == "not applicable"
    assert "no long prompt" in said(long(site, "quarter", 20))


def test_a_long_prompt(site, said):
    check = long(site, "quarter", 90)
    assert check.verdict == "ok"
    assert "90 tokens: first token after" in said(check)
    assert "go on as the text" not in said(check)  # the text was not read twice


def test_the_text_over_and_over(site, monkeypatch):
    monkeypatch.setitem(site.__dict__, "text_ids", list(range(20, 50)))
    assert site.prompt(65)[:3] == [0, 20, 21]
    assert site.prompt(65)[-5:] == [49, 20, 21, 22, 23]
    assert site.after(65, 3) == [24, 25, 26]


@pytest.mark.parametrize(
    ("is_release", "n_right", "verdict"), [(True, 3, "problem"), (True, 4, "ok"), (False, 0, "ok")]
)
def test_how_the_repeated_text_goes_on(site, said, told, monkeypatch, is_release, n_right, verdict):
    monkeypatch.setitem(site.__dict__, "text_ids", list(range(20, 50)))
    monkeypatch.setitem(site.__dict__, "is_release", is_release)
    told({"output_ids": site.after(65, n_right) + [0] * (LONG_OUTPUT_TOKENS - n_right)})
    check = long(site, "whole", 65)
    assert check.verdict == verdict
    assert f"{n_right} of 8 output tokens go on as the text, read 2 times before" in said(check)
    assert ("other weights than the release's need not" in said(check)) == (not is_release)


def test_other_weights_are_scored_but_not_judged(site, said):
    check = perplexity(site)
    assert check.verdict == "not applicable"
    assert "all tokens alike are 6.2383. The limits are of the release; this is another model" in said(check)
    assert check.values["tokens"] == site.lengths.quarter


def test_the_release_is_judged(site, said, monkeypatch):
    monkeypatch.setitem(site.__dict__, "is_release", True)
    check = perplexity(site)
    assert check.verdict == "problem"
    assert "nats/token, limit 3" in said(check)
