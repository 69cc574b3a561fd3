"""What the pictures of this folder share: an SVG that needs nothing else, its ticks, and a page around it."""

from __future__ import annotations

from html import escape
from itertools import count


def svg(width: float, height: float, left: float, title: str, body: str, style: str = "") -> str:
    """One picture: `title` at the top, from `left` on, and `body`.

    body   SVG below the title's 40 pixels; texts in class end or mid end at their x, or have it in their middle
    style  CSS of the body's classes
    """
    return _SVG.format(width=width, height=height, left=left, title=escape(title), body=body, style=style)


def page(title: str, picture: str, text: str) -> str:
    """An HTML page that loads nothing: an SVG, and text as it is printed."""
    return _PAGE.format(title=escape(title), picture=picture, text=escape(text))


def tick_step(most: float, n_ticks: int) -> float:
    """1, 2 or 5 times a power of ten, so that at most n_ticks of them fit."""
    steps = (digit * 10.0**power for power in count(-3) for digit in (1, 2, 5))
    return next(step for step in steps if step * n_ticks >= most)


_SVG = """\
<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">
<style>
text {{ font: 12px sans-serif; fill: #333 }}
.title {{ font-size: 15px; font-weight: bold }} .end {{ text-anchor: end }} .mid {{ text-anchor: middle }}
{style}
</style>
<rect width="{width}" height="{height}" fill="#fff"/>
<text class="title" x="{left}" y="26">{title}</text>
{body}
</svg>
"""

_PAGE = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>{title}</title>
<style>body {{ margin: 16px; font: 13px sans-serif }} svg {{ max-width: 100% }} pre {{ font: 12px monospace }}</style>
{picture}
<pre>{text}</pre>
</html>
"""
