"""The rungs of `rocline bring-up`, from below, and how long each takes."""

from __future__ import annotations

from functools import partial
from typing import Any

from rocline.tools import bring_up_cards as cards
from rocline.tools import bring_up_layers as layers
from rocline.tools import bring_up_requests as requests
from rocline.tools.bring_up_site import Expected, Rung, Site
from rocline.tools.doctor_checks import gib

TESTS_S, DOUBLE_TESTS_S = 600, 5  # of a card; of the double of HIP, where only a few run
HOST_S_PER_GB, CARD_S_PER_GB = 6, 0.25  # of layers that run once


def rungs_of(site: Site) -> list[Rung]:
    """The climb."""
    return [*_on_cards(site), *_on_the_model(site)]


def _rung(site: Site, name: str, what: str, expects: Any, make: Any, *more: Any) -> Rung:
    return Rung(name, what, expects, partial(make, site, *more))


def _on_cards(site: Site) -> list[Rung]:
    n_cards, layer_bytes = len(site.found.cards), layers.n_bytes(site.config)
    tests_s = DOUBLE_TESTS_S if site.is_double else TESTS_S * n_cards
    layers_s = layer_bytes / 1e9 * (HOST_S_PER_GB + CARD_S_PER_GB * n_cards)

    def assumed(seconds: float, of: str = "") -> Any:
        return lambda: Expected(seconds, f"assumed{of}")

    return [
        _rung(site, "kernel", "one kernel on each card", assumed(15), cards.kernel),
        _rung(site, "operators", "the tests of all operators on each card", assumed(tests_s), cards.operators),
        _rung(site, "golden", "golden data", assumed(300), cards.golden),
        _rung(site, "copies", "every ordered pair of cards by data", assumed(30), cards.copies),
        _rung(site, "shards", "headers and sizes of all shards", assumed(15), cards.shards),
        _rung(
            site,
            "layers",
            "the first layers' real weights, cards as the host",
            assumed(layers_s, f" of {gib(layer_bytes)}, most of it the host's"),
            layers.layers,
        ),
    ]


def _on_the_model(site: Site) -> list[Rung]:
    n = site.lengths

    def three(n_tokens: int) -> Any:
        return lambda: site.expects_prompts((n_tokens, "halo"), (n_tokens, "full"), (n_tokens, "halo"))

    def text() -> Expected:
        return site.expects_prompts((requests.n_scored(site), "full"))

    short = f"{n.request:,} tokens: full as halo, two chunk sizes"
    past = f"{n.past_candidates:,} tokens, the same: past the candidate blocks"
    above = ("quarter", n.quarter), ("whole", n.whole)
    return [
        _rung(site, "load", "all weights", site.expects_load, requests.load),
        _rung(site, "request", short, three(n.request), requests.request, "request", n.request),
        _rung(site, "perplexity", "the shipped text", text, requests.perplexity),
        _rung(site, "past-candidates", past, three(n.past_candidates), requests.past_candidates, n.past_candidates),
        *(
            _rung(site, name, f"{n:,} tokens", partial(site.expects_prompts, (n, "halo")), requests.long, name, n)
            for name, n in above
        ),
    ]
