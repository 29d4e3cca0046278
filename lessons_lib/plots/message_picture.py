"""The time of one message against its size: measured points, and the lines that links predict."""

from __future__ import annotations

import numpy as np
from matplotlib.ticker import FixedLocator, NullLocator

from ..hardware import Link, rate
from ..messages import half_size, message_time
from ..replay.timeline import size_text
from .curve_picture import LINES, short_time, time_range
from .figures import Picture
from .svg import log_ticks
from .wording import format_time, three_digits


def message_times(links, measured=None, title: str = "") -> Picture:
    """Seconds against bytes, both logarithmic: a line for each of 1 to 5 `links` (predicted), a point for each measured message.

    `measured` is (bytes, seconds), two sequences of the same length. A mark on each line shows where latency and bandwidth cost
    the same. The printed form is a table of the same numbers.
    """
    links = [links] if isinstance(links, Link) else links
    if (
        not isinstance(links, (list, tuple))
        or not 1 <= len(links) <= len(LINES)
        or not all(isinstance(link, Link) for link in links)
    ):
        raise ValueError(f"links must be 1 to {len(LINES)} links, such as [PCIE4, NVLINK4], not {links!r}.")
    points = [np.asarray(column, dtype=float) for column in measured] if measured is not None else None
    if points is not None and (len(points) != 2 or points[0].shape != points[1].shape or not points[0].size):
        raise ValueError("measured must be two sequences of the same length: (bytes, seconds).")
    ends = (points[0].min(), points[0].max()) if points is not None else (1e2, 1e10)
    sizes = np.logspace(np.log10(max(ends[0], 1)) - 0.3, np.log10(max(ends[1], 10)) + 0.3, 200)
    figure = Picture(message_table(links, points), (7.6, 4.2))
    axes = figure.add_subplot()
    for link, (colour, dash) in zip(links, LINES):
        axes.plot(sizes, message_time(sizes, link), color=colour, linestyle=dash, linewidth=2, label=f"predicted: {link.title}")
        half = half_size(link)
        if sizes[0] < half < sizes[-1]:
            axes.plot([half], [message_time(half, link)], "|", color=colour, markersize=16, markeredgewidth=2)
    if points is not None:
        axes.plot(*points, "o", color="#1a1a1a", label="measured")
    everything = np.concatenate([message_time(sizes, link) for link in links] + ([points[1]] if points is not None else []))
    low, high = time_range(everything)
    axes.set(xscale="log", yscale="log", xlim=(sizes[0], sizes[-1]), ylim=(low, high))
    _ticks(axes.xaxis, log_ticks(sizes[0], sizes[-1]), lambda value: size_text(value).replace(".0 ", " "))
    _ticks(axes.yaxis, log_ticks(low, high), short_time)
    axes.grid(color="#dddddd", linewidth=0.8)
    axes.set_xlabel("size of the message (a tick across a line: latency and bandwidth cost the same)")
    axes.set_ylabel("time of one message")
    axes.legend(frameon=False, fontsize=9)
    figure.suptitle(title or "Time of one message against its size", fontsize=11, weight="bold", x=0.01, ha="left")
    return figure


def message_table(links, points=None) -> str:
    """The same in letters: predicted times of each link at a few sizes, or at the measured ones beside the measured times."""
    lines = [
        f"{link.title}: latency {format_time(link.latency)}, both terms equal at {size_text(half_size(link))}" for link in links
    ]
    sizes, times = points if points is not None else (10.0 ** np.arange(3, 10, 3), None)
    for i, size in enumerate(np.asarray(sizes).tolist()):
        told = [
            f"predicted {format_time(float(message_time(size, link)))} over {link.name or rate(link.bandwidth)}" for link in links
        ]
        if times is not None:
            told.insert(0, f"measured {format_time(float(times[i]))}")
            told.append(f"x {three_digits(float(times[i]) / float(message_time(size, links[0])))}")
        lines.append(f"{size_text(size)}: " + ", ".join(told))
    return "\n".join(lines)


def _ticks(axis, values, words) -> None:
    axis.set_major_locator(FixedLocator(values))
    axis.set_major_formatter(lambda value, position: words(value))
    axis.set_minor_locator(NullLocator())
