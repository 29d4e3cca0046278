"""Curves and breakdown bars as matplotlib figures, for lessons that keep, restyle or save them.

Made with matplotlib's object-oriented interface: nothing is registered with pyplot, so nothing is drawn twice and no figure
is left behind. In a notebook such a figure displays itself; its printed form is the same finding as text.
"""

from __future__ import annotations

import base64
import io
import textwrap

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator

from ..hardware import number, rate
from .curve_picture import LINES, curves, links_by_importance, short_time, time_range
from .svg import COLOURS, log_ticks
from .text_pictures import breakdown_text, curve_text
from .wording import KINDS, format_time, time_unit, totals

RESOLUTION = 144  # dots per inch of the image: sharp on dense screens


class Picture(Figure):
    """A figure that shows itself in a notebook, once, and prints as its text form."""

    def __init__(self, text: str, size: tuple[float, float]):
        super().__init__(figsize=size, layout="constrained", facecolor="white")
        FigureCanvasAgg(self)
        self.text_form = text

    def __repr__(self) -> str:
        return self.text_form

    def _repr_mimebundle_(self, include=None, exclude=None):
        data = io.BytesIO()
        self.savefig(data, format="png", dpi=RESOLUTION)
        width = int(self.get_figwidth() * 100)
        bundle = {"image/png": base64.b64encode(data.getvalue()).decode(), "text/plain": self.text_form}
        return bundle, {"image/png": {"width": width}}


def curve(bandwidths, step_times, current: float | None = None, kind: str = "replayed", title: str = "") -> Picture:
    """Step time (seconds) against bandwidth (bytes/s per direction), both logarithmic, with marks at the real links in the range.

    `step_times` is what `sweep` gives, or several such arrays by name, told apart by colour and dash. `current` marks a bandwidth.
    `kind` says where the times come from: "replayed", "measured" or "predicted".
    """
    x, named = curves(bandwidths, step_times)
    order = np.argsort(x)
    figure = Picture(curve_text(bandwidths, step_times, kind), (7.6, 4.2))
    axes = figure.add_subplot()
    for (name, y), (colour, dash) in zip(named.items(), LINES):
        axes.plot(x[order], y[order], color=colour, linestyle=dash, linewidth=2, label=name or None)
        if current is not None:
            here = number(current, "The current bandwidth", "a positive, finite number of bytes per second")
            seconds = float(np.interp(np.log(here), np.log(x[order]), y[order]))
            axes.plot([here], [seconds], "o", color="#1a1a1a", markersize=8, zorder=5)
            right = here > x.max() ** 0.7 * x.min() ** 0.3
            axes.annotate(
                f"{rate(here)}: {format_time(seconds)}", (here, seconds), (-8 if right else 8, 9), textcoords="offset points",
                ha="right" if right else "left", weight="bold",
            )  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    low, high = time_range(np.concatenate(list(named.values())))
    axes.set(xlim=(x.min(), x.max()), ylim=(low, high))
    _ticks(axes.xaxis, log_ticks(x.min(), x.max()), lambda b: f"{b / 1e9:,g}")
    _ticks(axes.yaxis, log_ticks(low, high), short_time)
    axes.grid(color="#dddddd", linewidth=0.8)
    named_at: list[float] = []  # a name a hair's breadth from a more important one is left out; its line stays
    for link in links_by_importance(x.min(), x.max()):
        axes.axvline(link.bandwidth, color=COLOURS["link"], linestyle=":", linewidth=1)
        at = np.log(link.bandwidth / x.min()) / np.log(x.max() / x.min())
        if all(abs(at - other) > 0.02 for other in named_at):
            named_at.append(at)
            place = dict(xycoords=("data", "axes fraction"), textcoords="offset points", rotation=60)
            axes.annotate(link.name, (link.bandwidth, 1), (0, 3), fontsize=8, color="#555555", **place)
    axes.set_xlabel("bandwidth, GB/s per direction (1 GB = 1e9 bytes)")
    axes.set_ylabel(f"{kind} step time")
    figure.suptitle(title or f"{kind.capitalize()} step time against bandwidth", fontsize=11, weight="bold", x=0.01, ha="left")
    if any(named):
        axes.legend(frameon=False)
    return figure


def _ticks(axis, values, words) -> None:
    axis.set_major_locator(FixedLocator(values))
    axis.set_major_formatter(lambda value, position: words(value))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


def breakdown(timeline, title: str = "") -> Picture:
    """A bar a rank: seconds of compute, exposed communication and idle, which sum to the step; told apart by hatching as well."""
    ranks, seconds = timeline.world_size, totals(timeline)
    figure = Picture(breakdown_text(timeline), (7.6, 1.5 + max(0.12, 0.36 - 0.004 * ranks) * min(ranks, 64)))
    axes = figure.add_subplot()
    left = np.zeros(ranks)
    unit_name, unit = time_unit(timeline.step_time) if timeline.step_time > 0 else ("s", 1.0)
    with matplotlib.rc_context({"hatch.linewidth": 1.2}):
        for k, (name, hatch) in enumerate(zip(KINDS, ("", "////", ".."))):
            fill = "white" if name == "idle" else COLOURS[name]
            edge = "white" if name == "communication" else COLOURS[name]
            axes.barh(
                np.arange(ranks), seconds[:, k] / unit, left=left, height=0.7, color=fill, edgecolor=edge, hatch=hatch, label=name
            )
            left += seconds[:, k] / unit
    axes.set_yticks(np.arange(0, ranks, -(-ranks // 32)), [f"rank {r}" for r in range(0, ranks, -(-ranks // 32))])
    axes.set(ylim=(ranks - 0.5, -0.5), xlabel=f"{timeline.kind} time, {unit_name}")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    heading = title or f"{timeline.kind.capitalize()}: step {format_time(timeline.step_time)}"
    axes.set_title("\n".join(textwrap.wrap(timeline.title, 100)), fontsize=9, loc="left")
    figure.suptitle(heading, fontsize=11, weight="bold", x=0.01, ha="left")
    return figure
