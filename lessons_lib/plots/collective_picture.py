"""Algorithms of a collective against the size of the buffer, as SVG: predicted time, and bus bandwidth beside the link's rate."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..algorithms import Algorithm, fastest
from ..formulas import busbw
from ..hardware import rate
from ..replay.timeline import size_text
from .curve_picture import short_time
from .svg import box, document, line, text_width, write
from .wording import format_time

LOW, HIGH = 1e3, 1e10  # bytes: the range of sizes
TOP, BOTTOM, LEFT, RIGHT = 30, 44, 58, 14
# Colour and dash of each algorithm, by its place in the table of its collective: they keep theirs whichever others are shown.
STYLES = (
    ("#000000", "1 3"), ("#CC79A7", "7 2 1 2"), ("#E69F00", "2 2"), ("#56B4E9", "10 3"), ("#D55E00", ""), ("#009E73", "12 2 2 2"),
    ("#0072B2", "5 3"),
)  # fmt: skip
_SIZES = np.logspace(np.log10(LOW), np.log10(HIGH), 71)


@dataclass(frozen=True)
class Scene:
    """What is compared: `styles` maps the algorithms shown to their style; ranks, bytes/s, seconds, bytes."""

    styles: dict[Algorithm, tuple[str, str]]
    members: int
    bandwidth: float
    latency: float
    nbytes: float

    def time(self, algorithm: Algorithm, nbytes=None):
        """Predicted seconds at the current size, or at `nbytes`."""
        return algorithm.time(self.nbytes if nbytes is None else nbytes, self.members, self.bandwidth, self.latency)

    def stretches(self) -> list[tuple[float, Algorithm]]:
        """(from how many bytes on, the fastest algorithm) within the range of sizes that is drawn."""
        found = fastest(list(self.styles), self.members, self.bandwidth, self.latency)
        ends = [begin for begin, _ in found[1:]] + [np.inf]
        return [(begin, a) for (begin, a), end in zip(found, ends) if end > LOW and begin < HIGH]


def across(nbytes, width: int):
    """Pixels from the left of a size in bytes."""
    share = np.log(np.asarray(nbytes) / LOW) / np.log(HIGH / LOW)
    return LEFT + np.clip(share, 0, 1) * (width - LEFT - RIGHT)


def times_svg(scene: Scene, width: int = 440, height: int = 290) -> str:
    """Predicted time against size, both logarithmic: a curve for each algorithm, a ring where the fastest one changes."""
    curves = {a: scene.time(a, _SIZES) for a in scene.styles}
    lowest, highest = min(c[0] for c in curves.values()), max(c[-1] for c in curves.values())
    low = 10.0 ** np.floor(np.log10(lowest) + 1e-9)
    high = 10.0 ** max(np.ceil(np.log10(highest) - 1e-9), np.log10(low) + 1)
    inner = height - TOP - BOTTOM

    def up(seconds):
        return TOP + inner - np.clip(np.log(seconds / low) / np.log(high / low), 0, 1) * inner

    parts = [write(10, 18, "Predicted time against the size of the buffer", font_weight="bold")]
    for k in range(round(np.log10(high / low)) + 1):
        y = round(float(up(low * 10.0**k)), 1)
        parts += [
            line(LEFT, y, width - RIGHT, y, "#dddddd"),
            write(LEFT - 6, y + 4, short_time(low * 10.0**k), text_anchor="end", font_size=11),
        ]
    parts += _size_axis(width, height)
    for a, times in curves.items():
        parts.append(_curve(across(_SIZES, width), up(times), scene.styles[a]))
    for begin, a in scene.stretches():
        if begin > LOW:
            x, y = across(begin, width), up(scene.time(a, begin))
            parts.append(
                f'<circle class="crossing" cx="{x:.1f}" cy="{y:.1f}" r="5" fill="#fff" stroke="#1a1a1a" stroke-width="2"/>'
            )
    parts += _now(scene, width, height)
    for a in scene.styles:
        parts.append(_dot(across(scene.nbytes, width), up(scene.time(a)), scene.styles[a][0]))
    told = ", ".join(f"{a.name} {format_time(scene.time(a))}" for a in scene.styles)
    return document(width, height, f"Predicted time of {size_text(scene.nbytes)}: {told}.", parts)


def busbw_svg(scene: Scene, width: int = 300, height: int = 290) -> str:
    """Predicted bus bandwidth against size, as a share of the link's rate, which is the line at 100%."""
    inner = height - TOP - BOTTOM
    left = LEFT - 18

    def up(share):
        return TOP + inner - np.clip(share / 1.1, 0, 1) * inner

    def shares(algorithm, sizes):
        return [busbw(algorithm.collective, s, scene.members, scene.time(algorithm, s)) / scene.bandwidth for s in sizes]

    def x_of(nbytes):
        return left + (across(nbytes, width) - LEFT) * (width - left - RIGHT) / (width - LEFT - RIGHT)

    parts = [write(10, 18, "Predicted bus bandwidth", font_weight="bold")]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = round(float(up(share)), 1)
        colour, dash = ("#1a1a1a", "4 2") if share == 1 else ("#dddddd", "")
        parts += [
            line(left, y, width - RIGHT, y, colour, **({"stroke_dasharray": dash} if dash else {})),
            write(left - 5, y + 4, f"{100 * share:.0f}%", text_anchor="end", font_size=11),
        ]
    parts.append(write(left + 4, round(float(up(1.0)), 1) - 4, f"the link: {rate(scene.bandwidth)}", font_size=11))
    parts += _size_axis(width, height, x_of)
    for a, style in scene.styles.items():
        parts.append(_curve(x_of(_SIZES), up(np.array(shares(a, _SIZES))), style))
    parts += _now(scene, width, height, x_of, words=False)
    for a, style in scene.styles.items():
        parts.append(_dot(x_of(scene.nbytes), up(np.array(shares(a, [scene.nbytes])[0])), style[0]))
    return document(width, height, f"Predicted bus bandwidth as a share of the link's {rate(scene.bandwidth)}.", parts)


def sample_svg(style: tuple[str, str]) -> str:
    """A short piece of a curve, for the table beside its name."""
    return f'<svg width="34" height="10" aria-hidden="true">{line(0, 5, 34, 5, style[0], **_stroke(style))}</svg>'


def _stroke(style) -> dict:
    return {"stroke_width": "2.5"} | ({"stroke_dasharray": style[1]} if style[1] else {})


def _curve(x, y, style) -> str:
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y))
    dash = f' stroke-dasharray="{style[1]}"' if style[1] else ""
    return f'<polyline class="curve" points="{points}" fill="none" stroke="{style[0]}" stroke-width="2.2"{dash}/>'


def _dot(x, y, colour: str) -> str:
    return f'<circle class="current" cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}" stroke="#fff"/>'


def _size_axis(width: int, height: int, x_of=None) -> list[str]:
    bottom = height - BOTTOM
    x_of = x_of or (lambda nbytes: across(nbytes, width))
    parts = [line(x_of(LOW), bottom, width - RIGHT, bottom, "#1a1a1a"), line(x_of(LOW), TOP, x_of(LOW), bottom, "#1a1a1a")]
    for k in range(3, 11):
        x = round(float(x_of(10.0**k)), 1)
        parts.append(line(x, bottom, x, bottom + 5, "#1a1a1a"))
        if k % 3 == 0 or width > 400:
            name = size_text(10.0**k).replace(".0 ", " ")
            parts.append(write(x, bottom + 17, name, text_anchor="end" if k == 10 else "middle", font_size=11))
    parts.append(write((x_of(LOW) + width - RIGHT) / 2, height - 8, "full buffer", text_anchor="middle", font_size=11))
    return parts


def _now(scene: Scene, width: int, height: int, x_of=None, words: bool = True) -> list[str]:
    x = round(float((x_of or (lambda nbytes: across(nbytes, width)))(scene.nbytes)), 1)
    parts = [line(x, TOP, x, height - BOTTOM, "#1a1a1a", stroke_dasharray="4 3")]
    if words:
        told = size_text(scene.nbytes)
        wide = text_width(told, 12)
        at = x + 6 if x + 6 + wide < width - RIGHT else x - 6 - wide
        parts.append(box(round(at - 2, 1), TOP, round(wide + 4, 1), 16, "#fff", opacity="0.85"))
        parts.append(write(round(at, 1), TOP + 12, told, font_weight="bold"))
    return parts
