"""Step time against bandwidth, and where the time goes on each rank, as SVG: the pictures that move under a slider.

The curve's frame (axes, line, marks at real links) is drawn once; only the current point is new when a slider moves.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..hardware import LINKS, rate
from .svg import COLOURS, box, document, line, log_ticks, marks, text_width, write
from .wording import KINDS, format_time, percent, totals

# The links that are named first where names would touch each other.
FIRST_NAMED = ("10 Gbit Ethernet", "PCIe 4 x16", "InfiniBand NDR", "NVLink 4", "100 Gbit Ethernet", "NVLink 5", "25 Gbit Ethernet")
LEFT, RIGHT, TOP, BOTTOM = 58, 22, 62, 44
# Colour and dash of several curves in one figure.
LINES = (("#0072B2", "-"), ("#D55E00", "--"), ("#009E73", "-."), ("#CC79A7", ":"), ("#000000", (0, (5, 1, 1, 1, 1, 1))))


def curves(bandwidths, step_times) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Checked input: bandwidths (bytes/s), and name -> step times (seconds) of the same length; a single curve is named ""."""
    what = "Bandwidths must be two or more different, positive, finite numbers of bytes per second (450e9 is 450 GB/s)"
    x = _numbers(bandwidths, what)
    if len(x) < 2 or not (x > 0).all() or x.min() == x.max():
        raise ValueError(f"{what}, not {bandwidths!r}.")
    named = step_times if isinstance(step_times, dict) else {"": step_times}
    if not 1 <= len(named) <= len(LINES):
        raise ValueError(f"There are {len(named)} curves; a figure holds 1 to {len(LINES)} that can be told apart: draw several.")
    out = {}
    for name, times in named.items():
        whose = f" of {name!r}" if name else ""
        what = f"Step times{whose} must be {len(x)} finite numbers of seconds, 0 or more, one for each bandwidth"
        y = _numbers(times, what)
        if len(y) != len(x) or (y < 0).any():
            raise ValueError(f"{what}, not {times!r}.")
        out[str(name)] = y
    return x, out


def _numbers(values, what: str) -> np.ndarray:
    try:
        out = np.asarray(values)
        if out.dtype == bool or out.ndim != 1:
            raise TypeError
        out = out.astype(float)
    except (TypeError, ValueError):
        raise ValueError(f"{what}, not {values!r}.") from None
    if not np.isfinite(out).all():
        raise ValueError(f"{what}, not {values!r}.")
    return out


def links_by_importance(low: float, high: float, links=LINKS) -> list:
    """The named links from `low` to `high` bytes/s, those of FIRST_NAMED first."""
    here = [link for link in links if low <= link.bandwidth <= high]
    return sorted(here, key=lambda link: FIRST_NAMED.index(link.name) if link.name in FIRST_NAMED else len(FIRST_NAMED))


def nearest_link(bandwidth: float, within: float = 0.03):
    """The real link whose bandwidth is this one (3% more or less), or None."""
    link = min(LINKS, key=lambda link: abs(np.log(link.bandwidth / bandwidth)))
    return link if abs(link.bandwidth / bandwidth - 1) <= within else None


@dataclass(frozen=True)
class CurveFrame:
    """A drawn curve, and where a point of it lies."""

    static: str
    description: str
    width: int
    height: int
    x_range: tuple[float, float]  # bytes/s
    y_range: tuple[float, float]  # seconds

    def place(self, bandwidth: float, seconds: float) -> tuple[float, float]:
        """Pixels of a point, held within the frame."""
        return place(bandwidth, seconds, self.x_range, self.y_range, self.width, self.height)

    def svg(self, bandwidth: float | None = None, seconds: float | None = None) -> str:
        """The picture, with the current point if one is given."""
        parts, told = [self.static], self.description
        if bandwidth is not None and seconds is not None:
            x, y = self.place(bandwidth, seconds)
            bottom = self.height - BOTTOM
            parts.append(line(x, TOP, x, bottom, "#1a1a1a", stroke_dasharray="4 3"))
            parts.append(f'<circle class="current" cx="{x:g}" cy="{y:g}" r="6" fill="#1a1a1a" stroke="#fff" stroke-width="2"/>')
            words = f"{rate(bandwidth)}: {format_time(seconds)}"
            left = min(
                x + 8, self.width - text_width(words, 12) * 1.08
            )  # above and to the right, where a falling curve leaves room
            halo = dict(font_weight="bold", stroke="#fff", stroke_width="4", paint_order="stroke")
            parts.append(write(round(left, 1), max(y - 10, TOP + 12), words, **halo))
            told += f" Now {words}."
        return document(self.width, self.height, told, parts)


def place(bandwidth, seconds, x_range, y_range, width: int, height: int):
    """Pixels of points, held within the frame: both axes are logarithmic."""
    across = np.log(np.asarray(bandwidth) / x_range[0]) / np.log(x_range[1] / x_range[0])
    up = np.log(np.maximum(seconds, 1e-300) / y_range[0]) / np.log(y_range[1] / y_range[0])
    x = LEFT + np.clip(across, 0, 1) * (width - LEFT - RIGHT)
    y = height - BOTTOM - np.clip(up, 0, 1) * (height - TOP - BOTTOM)
    return np.round(x, 1), np.round(y, 1)


def curve_frame(bandwidths, step_times, kind: str = "replayed", width: int = 440, height: int = 280, axis: str = "") -> CurveFrame:
    """Draw step time (seconds) against bandwidth (bytes/s), both logarithmic, with the real links that fit the range.

    `kind` says where the times come from ("replayed", "measured", "predicted").
    """
    bandwidths, named = curves(bandwidths, step_times)
    (step_times,) = named.values()
    x_range, y_range = (bandwidths.min(), bandwidths.max()), time_range(step_times)
    points = polyline(*place(bandwidths, step_times, x_range, y_range, width, height))
    parts = [
        *axes_parts(f"{kind.capitalize()} step time against bandwidth", x_range, y_range, width, height),
        f'<polyline class="curve" {points} stroke="{COLOURS["compute"]}" stroke-width="2.5"/>',
        axis_name(axis, width, height),
    ]
    low, high = step_times[bandwidths.argmin()], step_times[bandwidths.argmax()]
    told = f"{kind.capitalize()} step time: {format_time(low)} at {rate(x_range[0])}, {format_time(high)} at {rate(x_range[1])}."
    return CurveFrame("".join(parts), told, width, height, x_range, y_range)


def polyline(x, y) -> str:
    """The points of a line, as attributes of <polyline>."""
    return f'points="{" ".join(f"{a:g},{b:g}" for a, b in zip(x, y))}" fill="none"'


def axes_parts(title: str, x_range, y_range, width: int, height: int) -> list[str]:
    """Both axes with round numbers, grid, and the real links that fit the range: what lies behind a curve."""
    bottom, right = height - BOTTOM, width - RIGHT

    def at(b, s=y_range[0]):
        return place(b, s, x_range, y_range, width, height)

    parts = [write(10, 18, title, font_weight="bold")]
    links = links_by_importance(*x_range)
    for link in links:
        x = at(link.bandwidth)[0]
        parts.append(line(x, TOP - 4, x, bottom, COLOURS["link"], stroke_dasharray="1 3"))
    placed = marks([(float(at(k.bandwidth)[0]), k.name) for k in links], 10, LEFT - 20, right + 8, rows=3)
    names = [write(round(middle, 1), TOP - 8 - 11 * row, name) for _, middle, row, name in placed]
    parts.append(f'<g class="links" font-size="10" text-anchor="middle" fill="#555">{"".join(names)}</g>')
    for t in log_ticks(*y_range, most=6):
        y = at(x_range[0], t)[1]
        parts += [line(LEFT, y, right, y, "#dddddd"), write(LEFT - 6, y + 4, short_time(t), text_anchor="end", font_size=11)]
    for b in log_ticks(*x_range, most=7):
        x = at(b)[0]
        parts += [
            line(x, bottom, x, bottom + 5, "#1a1a1a"),
            write(x, bottom + 17, f"{b / 1e9:,g}", text_anchor="middle", font_size=11),
        ]
    return parts + [
        line(LEFT, bottom, right, bottom, "#1a1a1a"),
        line(LEFT, TOP, LEFT, bottom, "#1a1a1a"),
    ]


def axis_name(words: str, width: int, height: int) -> str:
    """What the axis of bandwidths shows, below it."""
    middle = (LEFT + width - RIGHT) / 2
    return write(middle, height - 8, words or "bandwidth, GB/s per direction", text_anchor="middle", font_size=11)


def time_range(step_times: np.ndarray) -> tuple[float, float]:
    """Ends of a logarithmic time axis around these times: 1, 2 or 5 times a power of ten, at least a factor of two apart."""
    times = step_times[step_times > 0]
    if not len(times):
        return 1e-9, 1e-8
    steps = np.outer(10.0 ** np.arange(-13, 13), (1, 2, 5)).ravel()
    low = steps[np.searchsorted(steps, times.min() * (1 + 1e-9), side="right") - 1]
    high = steps[np.searchsorted(steps, max(times.max(), 2 * low) * (1 - 1e-9))]
    return float(low), float(high)


def short_time(seconds: float) -> str:
    """A round time for an axis: "20 ms"."""
    number, unit = format_time(seconds).split(" ")
    return f"{float(number.replace(',', '')):g} {unit}"


def breakdown_svg(timeline, width: int = 310, height: int = 280) -> str:
    """One bar a rank, divided into compute, communication and idle shares of the step; the mean over ranks below in words."""
    step, ranks = timeline.step_time, min(timeline.world_size, 64)
    shares = totals(timeline)[:ranks] / step if step > 0 else np.zeros((ranks, 3))
    left, top = 58, 34
    pitch = min(26.0, (height - top - 58) / ranks)
    bar = max(pitch * 0.72, 2.0)
    inner, bottom = width - left - 18, round(top + ranks * pitch + 2, 1)
    parts = [write(10, 18, f"{timeline.kind.capitalize()}: where the step goes", font_weight="bold")]
    for share in (0.0, 0.5, 1.0):
        x = left + share * inner
        parts += [line(x, top - 4, x, bottom, "#dddddd"), write(x, bottom + 14, percent(share), text_anchor="middle", font_size=11)]
    every = -(-12 // max(int(pitch), 1)) if pitch < 12 else 1  # names only as close as they can be read
    for rank in range(ranks):
        y = top + rank * pitch
        if rank % every == 0:
            parts.append(write(left - 8, round(y + bar / 2 + 4, 1), f"rank {rank}", text_anchor="end", font_size=11))
        x = float(left)
        for name, share in zip(KINDS, shares[rank].tolist()):
            length = round(share * inner, 1)
            if length > 0 and name == "compute":
                parts.append(box(round(x, 1), round(y, 1), length, round(bar, 1), COLOURS[name]))
            elif length > 0:
                thick, dash = (round(0.7 * bar, 1), "3.5 1.5") if name == "communication" else (1.5, "1.5 3")
                ends = (round(x, 1), round(y + bar / 2, 1), round(x + length, 1), round(y + bar / 2, 1))
                parts.append(line(*ends, COLOURS[name], stroke_width=thick, stroke_dasharray=dash))
            x += share * inner
    mean = shares.mean(axis=0)
    words = [f"{name} {percent(s)}" for name, s in zip(KINDS, mean)]
    parts.append(write(10, height - 8, "mean: " + ", ".join(words), font_size=11))
    return document(width, height, f"Share of the step, mean over ranks: {', '.join(words)}.", parts)
