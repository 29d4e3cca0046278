"""Several recordings to choose from, priced on one cluster: step time of each at one link, and over all its bandwidths, as SVG.

A choice is told from the others by its name, never by its colour alone. Which one is the best at which bandwidth is written in a
strip at the foot of the curves, with a ring where two curves cross there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..hardware import rate
from .curve_picture import BOTTOM, LEFT, TOP, CurveFrame, axes_parts, axis_name, place, polyline, time_range
from .svg import COLOURS, box, clip, document, line, text_width, write
from .wording import format_time, three_digits

ROW = 15.0  # pixels that a row of bars needs at least
STRIP = 18  # pixels of the strip under the curves
CUT = 4.0  # bars longer than so many times the shortest are cut off, with a mark: the others stay readable
EQUAL = 1e-9  # times this near to each other, relatively, are the same
ALIKE = 1.005  # below this ratio "1.00 times as long" would be shown


@dataclass(frozen=True, eq=False)
class Comparison:
    """`names` of n choices, `shown` among them. Seconds: `times` (n x bandwidths, bytes/s), `here` (n, at the present link).

    `compute` (n): mean over ranks of the seconds spent computing; the rest of `here` is communication and waiting. `title` says
    what the choices are.
    """

    title: str
    names: tuple[str, ...]
    shown: int
    bandwidths: np.ndarray
    times: np.ndarray
    here: np.ndarray
    compute: np.ndarray

    @property
    def best(self) -> int:
        """The choice with the shortest step here; the one shown if it is as short."""
        best = int(self.here.argmin())
        return self.shown if self.here[self.shown] <= self.here[best] * (1 + EQUAL) else best

    def stretches(self) -> list[tuple[float, int]]:
        """(from which bandwidth on, the best choice), by rising bandwidth. Crossings lie between two bandwidths: interpolated."""
        logs, x = np.log(np.maximum(self.times, 1e-300)), np.log(self.bandwidths)
        now = int(self.times[:, 0].argmin())
        found = [(float(self.bandwidths[0]), now)]
        for k in range(1, len(x)):
            if self.times[now, k] > self.times[:, k].min() * (1 + EQUAL):
                new = int(self.times[:, k].argmin())
                before, after = logs[now, k - 1] - logs[new, k - 1], logs[now, k] - logs[new, k]
                share = min(max(-before / (after - before), 0.0), 1.0)
                found.append((float(np.exp(x[k - 1] + share * (x[k] - x[k - 1]))), new))
                now = new
        return found

    def finding(self) -> str:
        """Which choice is the best here, and how much longer the one shown takes (or the slowest, if the best is shown)."""
        best = self.best
        words = f"Best here: {self._told(best)}, {format_time(self.here[best])}"
        other = self.shown if self.shown != best else int(self.here.argmax())
        if self.here[best] <= 0:
            return f"{words}."
        ratio = self.here[other] / self.here[best]
        if ratio < ALIKE:
            return f"{words}; {'every other choice' if best == self.shown else self.names[other]} takes about as long."
        return f"{words}; {self.names[other]} takes {three_digits(ratio)} times as long."

    def _told(self, i: int) -> str:
        """A choice's name; a bare number with what it counts."""
        title = self.title if self.title[1:2].isupper() else self.title[:1].lower() + self.title[1:]
        return self.names[i] if any(map(str.isalpha, self.names[i])) else f"{self.names[i]} ({title})"

    def turns(self, where: str) -> str:
        """Which choice is the best at which bandwidth of the link `where`."""
        stretches = self.stretches()
        names = [self.names[i] for _, i in stretches]
        if len(names) == 1:
            return f"{names[0]} is the best at every bandwidth {where}."
        if len(names) > 5:
            return f"The best choice changes {len(names) - 1} times along the bandwidth {where}: see the foot of the curves."
        parts = [f"{name} up to {rate(end)}" for name, (end, _) in zip(names, stretches[1:])]
        return f"The best by bandwidth {where}: {', '.join(parts)}, {names[-1]} above."

    def text(self) -> str:
        """A line a choice, for terminals and printed notebooks."""
        width = max(map(len, self.names))
        rows = [self.title]
        for i, (name, seconds) in enumerate(zip(self.names, self.here)):
            marks = [words for words, true in (("shown", i == self.shown), ("best", i == self.best)) if true]
            rows.append(f"  {name.ljust(width)}  {format_time(seconds).rjust(8)}  {', '.join(marks)}".rstrip())
        return "\n".join(rows)


def choices_frame(c: Comparison, axis: str = "", width: int = 440, height: int = 280) -> CurveFrame:
    """Step time against bandwidth: the choice shown as a thick curve, the others thin behind it, and who is the best where."""
    x_range, (low, high) = (c.bandwidths[0], c.bandwidths[-1]), time_range(c.times)
    y_range = (low / (high / low) ** (STRIP / (height - TOP - BOTTOM - STRIP)), high)
    some = np.unique(np.append(np.arange(0, len(c.bandwidths), 3), len(c.bandwidths) - 1))

    def at(bandwidth, seconds):
        return place(bandwidth, seconds, x_range, y_range, width, height)

    parts = axes_parts("Replayed step time against bandwidth", x_range, y_range, width, height)
    parts.append(axis_name(axis, width, height))
    for i, times in enumerate(c.times):
        if i != c.shown:
            parts.append(f'<polyline class="choice" {polyline(*at(c.bandwidths[some], times[some]))} stroke="#8c8c8c"/>')
    points = polyline(*at(c.bandwidths[some], c.times[c.shown][some]))
    parts.append(f'<polyline class="curve" {points} stroke="{COLOURS["compute"]}" stroke-width="2.5"/>')
    parts += _strip(c, at, height - BOTTOM)
    parts += _names(c, at)
    told = f"Replayed step time against bandwidth. {c.turns('of this link')}"
    return CurveFrame("".join(parts), told, width, height, x_range, y_range)


def _strip(c: Comparison, at, bottom: float) -> list[str]:
    """The names of the best choices along the foot of the curves, and a ring at each crossing from one to the next."""
    stretches = c.stretches()
    ends = [begin for begin, _ in stretches[1:]] + [c.bandwidths[-1]]
    parts = [box(LEFT + 1, bottom - STRIP + 2, float(at(c.bandwidths[-1], 1.0)[0]) - LEFT - 1, STRIP - 3, "#eeeeee")]
    for k, ((begin, i), end) in enumerate(zip(stretches, ends)):
        left, right = float(at(begin, 1.0)[0]), float(at(end, 1.0)[0])
        if k:
            y = float(at(begin, np.exp(np.interp(np.log(begin), np.log(c.bandwidths), np.log(np.maximum(c.times[i], 1e-300)))))[1])
            parts.append(line(left, y, left, bottom, "#1a1a1a"))
            parts.append(f'<circle class="crossing" cx="{left:g}" cy="{y:g}" r="4" fill="#fff" stroke="#1a1a1a" stroke-width="2"/>')
        label = f"best: {c.names[i]}"
        label = label if text_width(label, 11) <= right - left - 6 else clip(c.names[i], 11, right - left - 6)
        if label:
            bold = {"font_weight": "bold"} if i == c.shown else {}
            parts.append(write(round((left + right) / 2, 1), bottom - 4, label, font_size=11, text_anchor="middle", **bold))
    return parts


def _names(c: Comparison, at) -> list[str]:
    """The choices' names where their curves begin, as many as there is room for: first the one shown, then from the top."""
    parts, taken = [], []
    for i in sorted(range(len(c.names)), key=lambda i: (i != c.shown, -c.times[i, 0])):
        y = max(float(at(c.bandwidths[0], c.times[i, 0])[1]) - 3, TOP + 9)
        if all(abs(y - other) >= 11 for other in taken):
            taken.append(y)
            look = {"font_weight": "bold", "fill": COLOURS["compute"]} if i == c.shown else {"fill": "#555"}
            halo = {"stroke": "#fff", "stroke_width": "3", "paint_order": "stroke"}
            parts.append(write(LEFT + 4, round(y, 1), clip(c.names[i], 10, 110), font_size=10, **look, **halo))
    return parts


def choices_svg(c: Comparison, width: int = 310, height: int = 280) -> str:
    """A bar a choice: its step time at the present link, the part spent computing solid, the rest striped."""
    top, n = 34, len(c.names)
    height = max(height, round(top + ROW * n + 46))
    pitch = min(26.0, (height - top - 46) / n)
    bar = round(pitch * 0.66, 1)
    names = [clip(name, 11, 84) for name in c.names]
    left = 22 + round(max(text_width(name, 11) for name in names))
    right = width - 96
    longest = min(c.here.max(), CUT * c.here.min()) or c.here.max() or 1.0
    parts = [write(10, 18, clip(f"Replayed step time: {c.title}", 12, width - 20), font_weight="bold")]
    for i, (name, seconds, compute) in enumerate(zip(names, c.here.tolist(), c.compute.tolist())):
        y = round(top + i * pitch, 1)
        middle = round(y + bar / 2, 1)
        bold = {"font_weight": "bold"} if i == c.shown else {}
        if i == c.shown:
            parts.append(f'<path class="shown" d="M4 {middle - 5:g}l8 5l-8 5z" fill="#1a1a1a"/>')
        parts.append(write(left - 6, middle + 4, name, text_anchor="end", font_size=11, **bold))
        solid, whole = (round(min(s, longest) / longest * (right - left), 1) for s in (compute, seconds))
        if solid:
            parts.append(box(left, y, solid, bar, COLOURS["compute"]))
        if whole > solid:
            stripes = {"stroke_width": round(0.7 * bar, 1), "stroke_dasharray": "3.5 1.5"}
            parts.append(line(left + solid, middle, left + whole, middle, COLOURS["communication"], **stripes))
        if seconds > longest * (1 + EQUAL):  # cut off
            parts.append(line(right - 9, y + bar + 1, right - 5, y - 1, "#fff", stroke_width=3))
        words = format_time(seconds) + (" best" if i == c.best else "")
        parts.append(write(right + 5, middle + 4, words, font_size=11, **({"font_weight": "bold"} if i == c.best else {})))
    y = height - 26
    parts += [
        box(10, y - 8, 14, 9, COLOURS["compute"]), write(28, y, "compute (mean over ranks)", font_size=11),
        line(10, y + 14, 24, y + 14, COLOURS["communication"], stroke_width=7, stroke_dasharray="3.5 1.5"),
        write(28, y + 18, "communication and waiting", font_size=11),
    ]  # fmt: skip
    told = ", ".join(f"{name} {format_time(seconds)}" for name, seconds in zip(c.names, c.here))
    return document(width, height, f"Replayed step time by {c.title}: {told}. Shown: {c.names[c.shown]}.", parts)
