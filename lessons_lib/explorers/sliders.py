"""The controls of the bandwidth widget: logarithmic sliders for a link, with marks at real links, and the choice of a device."""

from __future__ import annotations

import math

import ipywidgets as widgets
import numpy as np

from ..hardware import DEVICES, LINKS, Cluster, Link
from ..plots.curve_picture import links_by_importance, nearest_link
from ..plots.svg import marks

LINK_CLASSES = {"intra_node": "inside a node", "inter_node": "across nodes"}
BANDWIDTH_STEP, LATENCY_STEP = 0.02, 0.05  # of the exponent: a key press is 4.7% and 12%
_TRACK = (8, 90)  # pixels from the widget's left and right edge to the ends of a slider's track


class LinkSliders:
    """The sliders for one link. Name and unit are text beside each, because its handle has no accessible name of its own."""

    def __init__(self, link: Link, bandwidths: tuple[int, int], latencies: tuple[int, int], where: str, track: float = 400.0):
        """`track`: pixels of the bandwidth slider's track where the page is narrow."""
        where = f" {where}" if where else ""
        self.bandwidth = _slider(link.bandwidth / 1e9, *bandwidths, BANDWIDTH_STEP)
        self.latency = _slider(link.latency * 1e6, *latencies, LATENCY_STEP)
        self.box = widgets.VBox([
            widgets.Label(f"Bandwidth of the link{where}, in GB/s per direction"), self.bandwidth,
            widgets.HTML(marks_html(self.bandwidth.min, self.bandwidth.max, track)),
            widgets.Label(f"Latency of the link{where}, in us per message"), self.latency,
        ])  # fmt: skip


def _slider(value: float, low: int, high: int, step: float) -> widgets.FloatLogSlider:
    least, most = notches(value, low, high, step)
    value = max(value, 10.0**least)
    return widgets.FloatLogSlider(
        value, base=10, min=least, max=most, step=step, readout_format=".3g", layout={"width": "100%", "margin": "0 2px"}
    )


def labelled(name: str, control) -> widgets.HBox:
    """A control with its name as text beside it."""
    return widgets.HBox([widgets.Label(name), control], layout={"flex_flow": "row wrap"})


def notched(options, value) -> widgets.SelectionSlider:
    """A slider over a list of choices: texts, or pairs (text, value)."""
    return widgets.SelectionSlider(options=options, value=value, layout={"width": "100%", "margin": "0 2px"})


def link_classes(ranks, cluster: Cluster) -> list[str]:
    """The links that programs of these numbers of ranks use, any of them: inside a node if two ranks share one, across nodes if
    they need several."""
    inside = ["intra_node"] if cluster.devices_per_node > 1 or max(ranks) == 1 else []
    return inside + (["inter_node"] if max(ranks) > cluster.devices_per_node else [])


def slider_range(values: list[float], low: int, high: int) -> tuple[int, int]:
    """Exponents of ten from `low` to `high`, widened to hold `values`; 0 has no logarithm and stays at the low end."""
    positive = [v for v in values if v > 0]
    return (
        min([low] + [math.floor(math.log10(v)) for v in positive]),
        max([high] + [math.ceil(math.log10(v) - 1e-12) for v in positive]),
    )


def notches(value: float, low: float, high: float, step: float) -> tuple[float, float]:
    """Ends of a slider from about `low` to about `high` (exponents of ten) on whose notches, `step` apart, `value` lies.

    The browser moves a value that lies between notches to the nearest one and reports that as a move.
    """
    at = min(max(math.log10(value), low), high) if value > 0 else low
    below, above = (math.floor(part / step + 1e-9) for part in (at - low, high - at))
    return at - below * step, at + above * step


def notches_of(slider: widgets.FloatLogSlider) -> np.ndarray:
    """All values that a logarithmic slider can take, rising."""
    return 10.0 ** (slider.min + slider.step * np.arange(round((slider.max - slider.min) / slider.step) + 1))


def named_link(bandwidth: float, latency: float, known=LINKS) -> Link:
    """The known link with these values (but for the last digits), or one named after the real link that is about as fast."""
    for link in known:
        if math.isclose(link.bandwidth, bandwidth) and math.isclose(link.latency, latency):
            return link
    near = nearest_link(bandwidth)
    return Link(bandwidth, latency, f"a link like {near.name}" if near else "")


def moved(change, link: Link, is_latency: bool, known=LINKS) -> Link | None:
    """The link after a move of its bandwidth slider (GB/s) or latency slider (us); None if nothing moved."""
    if math.isclose(change["old"], change["new"]):  # the browser computes 10**x with another last digit, and says so
        return None
    if is_latency:
        return named_link(link.bandwidth, change["new"] * 1e-6, known)
    return named_link(change["new"] * 1e9, link.latency, known)


def device_name(device) -> str:
    return device.name or "a device of your own"


def device_options(device) -> list[tuple]:
    """(text, device) for the catalogue, and the cluster's own device if it is none of them."""
    own = [] if device in DEVICES else [(device_name(device), device)]
    return own + [(f"{d.name} ({d.flops / 1e12:,.4g} TFLOP/s)", d) for d in DEVICES]


def marks_html(low: float, high: float, track: float = 400.0) -> str:
    """Names of real links under the bandwidth slider, which goes from 10**low to 10**high GB/s.

    `track` is its length in pixels in a narrow window; in a wider one the names lie farther apart.
    """
    at = {link.name: (math.log10(link.bandwidth / 1e9) - low) / (high - low) for link in LINKS}
    links = links_by_importance(1e9 * 10**low, 1e9 * 10**high)
    placed = marks([(at[link.name] * track, link.name) for link in links], 10, -4, track + 86, rows=2)
    tick = "position:absolute;top:0;height:5px;border-left:1px solid currentColor"
    parts = [f'<span style="{tick};left:{100 * at[link.name]:.2f}%"></span>' for link in links]
    for x, middle, row, name in placed:
        align = f"left:{100 * x / track:.2f}%;transform:translateX(-50%)" if middle == x else f"left:{100 * x / track:.2f}%"
        style = f"position:absolute;white-space:nowrap;top:{5 + 12 * row}px;{align}"
        parts.append(f'<span style="{style}">{name}</span>')
    left, right = _TRACK
    place = f"position:relative;height:32px;margin:0 {right}px 0 {left}px;font-size:10px;line-height:12px"
    return f'<div style="{place}">{"".join(parts)}</div>'
