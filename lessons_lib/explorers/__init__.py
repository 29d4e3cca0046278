"""The bandwidth widget: one recording, any link. A slider moves and the timeline, the curve, the bars and the sentence follow.

A move costs one replay and one message to the browser (an HTML widget holds everything that changes), about 10 ms of Python for
500 bars. The curve is priced by one sweep when device, latency or the choice of link change, not when the bandwidth does.
"""

from __future__ import annotations

import math
from dataclasses import replace as changed

import ipywidgets as widgets
import numpy as np

from ..hardware import LINKS, Cluster, Link
from ..plots.curve_picture import breakdown_svg, curve_frame
from ..plots.svg import image
from ..plots.timeline_picture import timeline_svg
from ..plots.wording import format_time, sentence
from ..recording import Recording
from ..replay import replay, sweep
from ..stored import hiding_rule, key_of, paragraph, show
from .guesses import Guess, guess
from .sliders import LINK_CLASSES, LinkSliders, device_name, device_options, labelled, link_classes, named_link, slider_range

__all__ = ["Explorer", "Guess", "explore", "guess"]

WIDTH = 760  # pixels of the whole widget
DRAWN = 660  # pixels of the timeline before it is fitted to the window: its letters stay readable in a narrow one
POINTS = 61  # of the curve
FITTED = "<style>.fitted > svg{width:100%}</style>"


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
        self._given = self._links()
        self._frame = None
        names = {k: LINK_CLASSES[k] for k in self._classes}
        self.link = widgets.ToggleButtons(options=[(name, k) for k, name in names.items()], tooltips=list(names.values()))
        self.device = widgets.Dropdown(options=device_options(cluster.device), value=cluster.device, layout={"width": "260px"})
        bandwidths, latencies = [k.bandwidth / 1e9 for k in self._given], [k.latency * 1e6 for k in self._given]
        ranges = slider_range(bandwidths, 0, 3), slider_range(latencies, -1, 3)
        # Sliders of their own for each link, whose notches hold its values: the browser may not move a value to another notch.
        self._sliders = {k: LinkSliders(link, *ranges, LINK_CLASSES[k]) for k, link in zip(self._classes, self._given)}
        self.picture = widgets.HTML(layout={"width": "100%", "margin": "6px 0 0 0"})
        rows = [labelled("Device", self.device)]
        if len(self._classes) > 1:
            rows.append(labelled("The sliders set the link", self.link))
        rows += [sliders.box for sliders in self._sliders.values()]
        super().__init__([*rows, self.picture], layout={"max_width": f"{WIDTH}px", "width": "100%"})
        self._replay()
        self._sweep()
        self._key = key_of(self.sentence, self._settings(), timeline_svg(self.timeline, DRAWN))
        self._draw()
        self._stored = self._static_html()
        self._plain = f"{self.sentence}\n{self._settings()}"
        for sliders in self._sliders.values():
            sliders.bandwidth.observe(self._bandwidth_moved, "value")
            sliders.latency.observe(self._latency_moved, "value")
        self.device.observe(lambda change: self._change(True, device=change["new"]), "value")
        self.link.observe(lambda change: self._link_chosen(), "value")

        self._show_sliders()

    @property
    def bandwidth(self) -> widgets.FloatLogSlider:
        """The bandwidth slider now shown, in GB/s per direction."""
        return self._sliders[self.link.value].bandwidth

    @property
    def latency(self) -> widgets.FloatLogSlider:
        """The latency slider now shown, in us per message."""
        return self._sliders[self.link.value].latency

    # ---- what the reader does ------------------------------------------------------------------------------------

    def _link_chosen(self) -> None:
        """The sliders of the other link are shown; the step does not change, the curve does."""
        self._show_sliders()
        self._update(sweeps=True)

    def _show_sliders(self) -> None:
        for name, sliders in self._sliders.items():
            sliders.box.layout.display = None if name == self.link.value else "none"

    def _bandwidth_moved(self, change) -> None:
        name, link = self._moved_link(change["owner"])
        if not math.isclose(change["old"], change["new"]):  # the browser computes 10**x with another last digit, and says so
            self._change(False, **{name: self._named(change["new"] * 1e9, link.latency)})

    def _latency_moved(self, change) -> None:
        name, link = self._moved_link(change["owner"])
        if not math.isclose(change["old"], change["new"]):
            self._change(True, **{name: self._named(link.bandwidth, change["new"] * 1e-6)})

    def _moved_link(self, slider) -> tuple[str, Link]:
        name = next(name for name, own in self._sliders.items() if slider in (own.bandwidth, own.latency))
        return name, getattr(self.cluster, name)

    def _named(self, bandwidth: float, latency: float) -> Link:
        return named_link(bandwidth, latency, (*self._given, *LINKS))

    def _change(self, sweeps: bool, **fields) -> None:
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
        self.picture.value = FITTED + hiding_rule(self._key) + self._body()

    def _words(self) -> str:
        return (
            f'<div role="status" style="min-height:90px">{paragraph(self.sentence, "font-weight:600")}'
            f"{paragraph(self._settings())}</div>"
        )

    def _body(self) -> str:
        """Everything that changes; every part keeps its size, also when a replay fails."""
        if self.timeline is not None:
            self._pictures = (
                timeline_svg(self.timeline, DRAWN),
                self._frame.svg(getattr(self.cluster, self.link.value).bandwidth, self.timeline.step_time),
                breakdown_svg(self.timeline),
            )
        top, left, right = self._pictures
        hidden = "" if self.timeline is not None else "visibility:hidden;"
        return (
            f'<div style="background:#fff;color:#1a1a1a;padding:8px;line-height:1.4;font-size:13px">{self._words()}'
            f'<div style="{hidden}"><div class="fitted">{top}</div><div style="display:flex;flex-wrap:wrap;gap:4px">'
            f'<div style="flex:440 1 340px;min-width:0">{left}</div><div style="flex:300 1 250px;min-width:0">{right}</div>'
            "</div></div></div>"
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
