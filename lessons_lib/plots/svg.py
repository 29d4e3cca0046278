"""What our SVG pictures share: palette, escaped text, axes with round numbers.

Pictures are written by hand rather than by matplotlib where a slider redraws them: 2 ms instead of 50, and the same
text on every system, so that a stored notebook output can be compared character by character.
No element has an id: two pictures on one page cannot disturb each other, also when one of them is hidden.
"""

from __future__ import annotations

import base64
import math
import re
from html import escape

import numpy as np

# Okabe and Ito's palette, which stays apart in every common form of colour-blindness; height and texture differ as well.
COLOURS = {"compute": "#0072B2", "communication": "#D55E00", "idle": "#767676", "transfer": "#E69F00", "link": "#999999"}
FONT = "font-family=\"system-ui,'Segoe UI','DejaVu Sans',Arial,sans-serif\""
_NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_ROUND = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)


def clean(value: object) -> str:
    """One line of text that XML allows, with < > & and quotes escaped."""
    return escape(_NOT_IN_XML.sub("?", " ".join(str(value).split())))


def text_width(value: str, size: float) -> float:
    """Pixels that this text takes at most in a common sans-serif font of `size` pixels (wide characters count double)."""
    return size * 0.57 * sum(2 if ord(c) > 0x1100 else 1 for c in value)


def clip(value: object, size: float, width: float) -> str:
    """The part of `value` that fits into `width` pixels, shortened by an ellipsis; "" if under three characters fit.

    A number at the end stays ("forward 12" becomes "fo\u2026 12"), since it is what tells one label from the next.
    """
    line = " ".join(str(value).split())
    if text_width(line, size) <= width:
        return line
    head, _, tail = line.rpartition(" ")
    tail = f" {tail}" if head and tail.isdigit() and len(tail) < 5 else ""
    head = head if tail else line
    room = min(int(width / (size * 0.57)) - 1 - len(tail), len(head))
    while room >= 1 and text_width(head[:room] + "\u2026" + tail, size) > width:
        room -= 1
    return head[:room].rstrip() + "\u2026" + tail if room >= (1 if tail else 3) else ""


def write(x: float, y: float, value: object, **attributes) -> str:
    """A <text> element; attribute names have _ for -."""
    return f'<text x="{x:g}" y="{y:g}"{_attributes(attributes)}>{clean(value)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, colour: str, **attributes) -> str:
    return f'<path d="M{x1:g} {y1:g}L{x2:g} {y2:g}" stroke="{colour}" fill="none"{_attributes(attributes)}/>'


def box(x: float, y: float, width: float, height: float, colour: str, **attributes) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{colour}"{_attributes(attributes)}/>'


def _attributes(attributes: dict) -> str:
    return "".join(f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items())


def document(width: float, height: float, description: str, parts: list[str]) -> str:
    """A whole picture on its own white ground (so that it reads in a dark theme), described for a screen reader."""
    size = f'width="{width:g}" height="{height:g}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{clean(description)}" {size} '
        f'viewBox="0 0 {width:g} {height:g}" style="max-width:100%;height:auto;display:block" {FONT} font-size="12" fill="#1a1a1a">'
        f'<rect {size} fill="#fff"/>{"".join(parts)}</svg>'
    )


def image(svg: str, description: str) -> str:
    """The picture as an <img>: shown also where notebooks are not trusted, and there inline SVG is stripped."""
    data = base64.b64encode(svg.encode()).decode()
    return f'<img alt="{clean(description)}" style="max-width:100%" src="data:image/svg+xml;base64,{data}">'


def round_up(value: float) -> float:
    """The next round number: 1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8 or 10 times a power of ten. Axes end there, so they rarely jump."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(r * power for r in (*_ROUND, 20.0) if value <= r * power * (1 + 1e-9))


def log_ticks(low: float, high: float, most: int = 8) -> np.ndarray:
    """Round values from `low` to `high` for a logarithmic axis: powers of ten, and between them 2 and 5 or 3 if `most` allows."""
    powers = 10.0 ** np.arange(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1, 2, 5), (1, 3), (1,)):
        values = np.outer(powers, steps).ravel()
        values = values[(values >= low * (1 - 1e-9)) & (values <= high * (1 + 1e-9))]
        if len(values) <= most:
            return values
    return values[:: -(-len(values) // most)]


def marks(named: list[tuple[float, str]], size: float, low: float, high: float, rows: int) -> list[tuple[float, float, int, str]]:
    """Names above or below an axis, as (x of the mark, x of the text's middle, row, name): as many as fit without touching.

    `named` are (x, name), the most important first; a text stays within low..high and takes the first row with room for it.
    """
    taken: list[list[tuple[float, float]]] = [[] for _ in range(rows)]
    placed = []
    for x, name in named:
        half = text_width(name, size) / 2 + 4
        middle = min(max(x, low + half), high - half)
        for row, others in enumerate(taken):
            if all(middle + half <= a or middle - half >= b for a, b in others):
                others.append((middle - half, middle + half))
                placed.append((x, middle, row, name))
                break
    return placed


def ticks(end: float, most: int = 8) -> np.ndarray:
    """Round steps from 0 to `end`, at most `most` of them."""
    power = 10.0 ** math.floor(math.log10(end / most))
    step = next(r * power for r in (1.0, 2.0, 5.0, 10.0, 20.0) if end / (r * power) <= most * (1 + 1e-9))
    return step * np.arange(int(end / step * (1 + 1e-9)) + 1)
