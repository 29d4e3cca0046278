"""The bandwidth widget: one recording, any link. A slider moves and the timeline, the curve, the bars and the sentence follow.

A move costs one replay and one message to the browser (an HTML widget holds everything that changes), about 10 ms of Python for
500 bars. The curve is priced by one sweep when device, latency or the choice of link change, not when the bandwidth does.
"""

from __future__ import annotations

import math
from dataclasses import replace as changed

import ipywidgets as widgets
import numpy as np

from .curve_picture import breakdown_svg, curve_frame, links_by_importance, nearest_link
from .guesses import Guess, guess
from .hardware import DEVICES, LINKS, Cluster, Link
from .recording import Recording
from .replay import replay, sweep
from .stored import hiding_rule, key_of, paragraph, show
from .svg import image, marks
from .timeline_picture import timeline_svg
from .wording import format_time, sentence

__all__ = ["Explorer", "Guess", "explore", "guess"]

WIDTH = 760  # pixels of the whole widget
POINTS = 61  # of the curve
LINK_CLASSES = {"intra_node": "inside a node", "inter_node": "across nodes"}
_NAME, _UNIT = "168px", "118px"  # the columns left and right of the sliders
_MARKS_INSET = (168 + 14, 118 + 92)  # from the widget's edges to the ends of a slider's track


def explore(recording: Recording, cluster: Cluster) -> Explorer:
    """A widget that replays `recording` on `cluster` and on what the reader's sliders make of it.

    Without a kernel the saved notebook shows its first picture and the finding as text. Raises what `replay` raises for a recording
    that cannot run on this cluster.
    """
    if not isinstance(recording, Recording):
        raise TypeError(f"explore needs a Recording, which run(...) returns or Recording.load(path) reads, not {recording!r}.")
    if not isinstance(cluster, Cluster):
        raise TypeError(f"explore needs a Cluster, such as Cluster(H100), not {cluster!r}.")
    return Explorer(recording, cluster)


class Explorer(widgets.VBox):
    """What `explore` returns. `cluster`, `timeline` and `sentence` are those now shown; `error` is why nothing could be replayed.

    `bandwidth` (GB/s per direction) and `latency` (us) are the sliders, `device` the choice of a device, `link` the choice of the
    link that the sliders set, `picture` the HTML below them.
    """

    def __init__(self, recording: Recording, cluster: Cluster):
        self.recording, self.cluster = recording, cluster
        self.error: Exception | None = None
        self._classes = link_classes(recording.world_size, cluster)
        self._frame = None
        self._silent = True  # sliders being set by us, not by the reader
        first = getattr(cluster, self._classes[0])
        names = {k: LINK_CLASSES[k] for k in self._classes}
        self.link = widgets.ToggleButtons(options=[(name, k) for k, name in names.items()], tooltips=list(names.values()))
        self.device = widgets.Dropdown(options=device_options(cluster.device), value=cluster.device, layout={"width": "260px"})
        self.bandwidth = _slider(first.bandwidth / 1e9, *slider_range([b.bandwidth / 1e9 for b in self._links()], 0, 3), step=0.02)
        self.latency = _slider(first.latency * 1e6, *slider_range([k.latency * 1e6 for k in self._links()], -1, 3), step=0.05)
        self.picture = widgets.HTML(layout={"width": "100%", "margin": "6px 0 0 0"})
        rows = [_row("Device", self.device)]
        if len(self._classes) > 1:
            rows.append(_row("The sliders set the link", self.link))
        where = f" {LINK_CLASSES[self._classes[0]]}" if len(self._classes) == 1 else ""
        rows += [
            _row(f"Bandwidth{where}", self.bandwidth, "GB/s per direction"),
            widgets.HTML(marks_html(self.bandwidth.min, self.bandwidth.max)),
            _row("Latency", self.latency, "us per message"),
        ]
        super().__init__([*rows, self.picture], layout={"max_width": f"{WIDTH}px", "width": "100%"})
        self._replay()
        self._sweep()
        self._key = key_of(self.sentence, self._settings(), timeline_svg(self.timeline, WIDTH))
        self._draw()
        self._stored = self._static_html()
        self._plain = f"{self.sentence}\n{self._settings()}"
        self._silent = False
        self.bandwidth.observe(lambda change: self._bandwidth_moved(), "value")
        self.latency.observe(lambda change: self._latency_moved(), "value")
        self.device.observe(lambda change: self._change(True, device=change["new"]), "value")
        self.link.observe(lambda change: self._link_chosen(), "value")

    # ---- what the reader does ------------------------------------------------------------------------------------

    def _link_chosen(self) -> None:
        """The sliders take the values of the other link; the step does not change, the curve does."""
        self._silent = True
        link = getattr(self.cluster, self.link.value)
        self.bandwidth.value, self.latency.value = link.bandwidth / 1e9, link.latency * 1e6
        self._silent = False
        self._update(sweeps=True)

    def _bandwidth_moved(self) -> None:
        link = getattr(self.cluster, self.link.value)
        self._change(False, **{self.link.value: named_link(self.bandwidth.value * 1e9, link.latency)})

    def _latency_moved(self) -> None:
        link = getattr(self.cluster, self.link.value)
        self._change(True, **{self.link.value: named_link(link.bandwidth, self.latency.value * 1e-6)})

    def _change(self, sweeps: bool, **fields) -> None:
        if not self._silent:
            self.cluster = changed(self.cluster, **fields)
            self._update(sweeps)

    def _update(self, sweeps: bool) -> None:
        try:
            self._replay()
            if sweeps or self._frame is None:
                self._sweep()
        except Exception as error:  # whatever it is, the reader sees it where the picture was, and `error` keeps it
            self.error, self.timeline, self._frame = error, None, None
            self.sentence = f"This cannot be replayed. {type(error).__name__}: {error}"
        self._draw()

    # ---- computing -------------------------------------------------------------------------------------------------

    def _links(self) -> list[Link]:
        return [getattr(self.cluster, name) for name in self._classes]

    def _replay(self) -> None:
        self.timeline = replay(self.recording, self.cluster)
        self.sentence, self.error = sentence(self.timeline), None

    def _sweep(self) -> None:
        bandwidths = 1e9 * np.logspace(self.bandwidth.min, self.bandwidth.max, POINTS)
        times = sweep(self.recording, self.cluster, link=self.link.value, bandwidths=bandwidths)
        axis = f"bandwidth {LINK_CLASSES[self.link.value]}, GB/s per direction"
        self._frame = curve_frame(bandwidths, times, axis=axis)

    def _settings(self) -> str:
        parts = []
        for name in self._classes:
            link = getattr(self.cluster, name)
            parts.append(f"{LINK_CLASSES[name]} {link.title}, latency {format_time(link.latency)}")
        return f"{self.recording.world_size} ranks on {device_name(self.cluster.device)}; " + "; ".join(parts) + "."

    # ---- showing -----------------------------------------------------------------------------------------------------

    def _draw(self) -> None:
        self.picture.value = hiding_rule(self._key) + self._body()

    def _words(self) -> str:
        return (
            f'<div role="status" style="min-height:64px">{paragraph(self.sentence, "font-weight:600;font-size:14px")}'
            f"{paragraph(self._settings())}</div>"
        )

    def _body(self) -> str:
        """Everything that changes; every part keeps its size, also when a replay fails."""
        if self.timeline is not None:
            self._pictures = (
                timeline_svg(self.timeline, WIDTH - 16),
                self._frame.svg(getattr(self.cluster, self.link.value).bandwidth, self.timeline.step_time),
                breakdown_svg(self.timeline),
            )
        top, left, right = self._pictures
        hidden = "" if self.timeline is not None else "visibility:hidden;"
        return (
            f'<div style="background:#fff;color:#1a1a1a;padding:8px;line-height:1.4;font-size:13px">{self._words()}'
            f'<div style="{hidden}">{top}<div style="display:flex;gap:4px"><div style="flex:440 1 0;min-width:0">{left}</div>'
            f'<div style="flex:310 1 0;min-width:0">{right}</div></div></div></div>'
        )

    def _static_html(self) -> str:
        top, left, right = self._pictures
        pictures = [image(top, self.sentence), image(left, self._frame.description), image(right, "Where each rank's step goes")]
        pictures.append(paragraph("Run this cell to move the link under the picture.", "font-style:italic"))
        return (
            f'<div style="background:#fff;color:#1a1a1a;padding:8px;max-width:{WIDTH}px">{self._words()}{"".join(pictures)}</div>'
        )

    def _ipython_display_(self, **options) -> None:
        show(self, self._stored, self._plain, self._key)

    def __repr__(self) -> str:
        return f"Explorer of {self.recording.world_size} ranks; its sliders appear where a kernel runs"


def link_classes(ranks: int, cluster: Cluster) -> list[str]:
    """The links that this many ranks use: inside a node if two ranks share one, across nodes if they need several."""
    inside = ["intra_node"] if cluster.devices_per_node > 1 or ranks == 1 else []
    return inside + (["inter_node"] if ranks > cluster.devices_per_node else [])


def slider_range(values: list[float], low: int, high: int) -> tuple[int, int]:
    """Exponents of ten from `low` to `high`, widened to hold `values`; 0 has no logarithm and stays at the low end."""
    positive = [v for v in values if v > 0]
    return (
        min([low] + [math.floor(math.log10(v)) for v in positive]),
        max([high] + [math.ceil(math.log10(v) - 1e-12) for v in positive]),
    )


def named_link(bandwidth: float, latency: float) -> Link:
    """The catalogue's link with exactly these values, or one named after the real link that is about as fast."""
    exact = next((link for link in LINKS if (link.bandwidth, link.latency) == (bandwidth, latency)), None)
    near = nearest_link(bandwidth)
    return exact or Link(bandwidth, latency, f"a link like {near.name}" if near else "")


def device_name(device) -> str:
    return device.name or "a device of your own"


def device_options(device) -> list[tuple]:
    """(text, device) for the catalogue, and the cluster's own device if it is none of them."""
    own = [] if device in DEVICES else [(device_name(device), device)]
    return own + [(f"{d.name} ({d.flops / 1e12:,.4g} TFLOP/s)", d) for d in DEVICES]


def marks_html(low: float, high: float) -> str:
    """Names of real links under the bandwidth slider, which goes from 10**low to 10**high GB/s."""
    track = WIDTH - sum(_MARKS_INSET)
    at = {link.name: (math.log10(link.bandwidth / 1e9) - low) / (high - low) for link in LINKS}
    links = links_by_importance(1e9 * 10**low, 1e9 * 10**high)
    placed = marks([(at[link.name] * track, link.name) for link in links], 10, -60, track + 60, rows=2)
    tick = "position:absolute;top:0;height:5px;border-left:1px solid currentColor"
    parts = [f'<span style="{tick};left:{100 * at[link.name]:.2f}%"></span>' for link in links]
    for _, middle, row, name in placed:
        style = f"left:{100 * middle / track:.2f}%;top:{5 + 12 * row}px;transform:translateX(-50%)"
        parts.append(f'<span style="position:absolute;white-space:nowrap;{style}">{name}</span>')
    left, right = _MARKS_INSET
    place = f"position:relative;height:32px;margin:0 {right}px 0 {left}px;font-size:10px;line-height:12px"
    return f'<div style="{place}">{"".join(parts)}</div>'


def _slider(value: float, low: int, high: int, step: float) -> widgets.FloatLogSlider:
    value = min(max(value, 10.0**low), 10.0**high)
    return widgets.FloatLogSlider(
        value, base=10, min=low, max=high, step=step, readout_format=".3g", layout={"flex": "1 1 auto", "width": "auto"}
    )


def _row(name: str, control, unit: str = "") -> widgets.HBox:
    """A control with its name and unit as text beside it: the slider's handle has no accessible name of its own."""
    parts = [widgets.Label(name, layout={"width": _NAME}), control]
    return widgets.HBox(parts + ([widgets.Label(unit, layout={"width": _UNIT})] if unit else []))
