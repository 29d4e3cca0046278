"""The bandwidth widget: a recording, any link. A slider moves and the timeline, the curve, the bars and the sentence follow.

A move costs one replay and one message to the browser (an HTML widget holds everything that changes), about 10 ms of Python for
500 bars. Curves are priced by one sweep when device, latency or the choice of link change, not when the bandwidth does.
"""

from __future__ import annotations

import math
from dataclasses import replace as changed

import ipywidgets as widgets
import numpy as np

from ..hardware import LINKS, Cluster, Link
from ..plots.choices_picture import Comparison, choices_frame, choices_svg
from ..plots.curve_picture import breakdown_svg, curve_frame
from ..plots.svg import image
from ..plots.timeline_picture import timeline_height, timeline_svg
from ..plots.wording import format_time, sentence
from ..recording import Recording
from ..replay import replay
from ..stored import hiding_rule, key_of, paragraph, show
from .choices import Prices
from .sliders import (
    LINK_CLASSES,
    LinkSliders,
    device_name,
    device_options,
    labelled,
    link_classes,
    named_link,
    notched,
    notches_of,
    slider_range,
)

WIDTH = 760  # pixels of the whole widget
POINTS = 61  # of a curve alone
DRAWN = 660  # pixels of the timeline before it is fitted to the window: its letters stay readable in a narrow one
FITTED = "<style>.fitted > svg{width:100%}</style>"


class Explorer(widgets.VBox):
    """What `explore` returns. `cluster`, `timeline` and `sentence` are those now shown; `error` is why nothing could be replayed.

    `bandwidth` (GB/s per direction) and `latency` (us) are the sliders, `device` the choice of a device, `link` the choice of the
    link that the sliders set, `choice` the slider over `choices` (recordings by name; None where there is nothing to choose),
    `picture` the HTML below them.
    """

    def __init__(self, choices: dict[str, Recording], cluster: Cluster, name: str = "Choice", start: str | None = None):
        self.choices, self.cluster, self._name = choices, cluster, name
        self._named_choices = "" not in choices
        self.error: Exception | None = None
        self._classes = link_classes([r.world_size for r in choices.values()], cluster)
        self._given = [getattr(cluster, k) for k in self._classes]
        names = {k: LINK_CLASSES[k] for k in self._classes}
        self.link = widgets.ToggleButtons(options=[(text, k) for k, text in names.items()], tooltips=list(names.values()))
        self.device = widgets.Dropdown(options=device_options(cluster.device), value=cluster.device, layout={"width": "260px"})
        self.choice = notched(list(choices), start or next(iter(choices))) if len(choices) > 1 else None
        bandwidths, latencies = [k.bandwidth / 1e9 for k in self._given], [k.latency * 1e6 for k in self._given]
        ranges = slider_range(bandwidths, 0, 3), slider_range(latencies, -1, 3)
        # Sliders of their own for each link, whose notches hold its values: the browser may not move a value to another notch.
        self._sliders = {k: LinkSliders(link, *ranges, LINK_CLASSES[k]) for k, link in zip(self._classes, self._given)}
        self._prices = Prices(choices, {k: self._lanes(own.bandwidth) for k, own in self._sliders.items()})
        self.picture = widgets.HTML(layout={"width": "100%", "margin": "6px 0 0 0"})
        super().__init__([*self._rows(), self.picture], layout={"max_width": f"{WIDTH}px", "width": "100%"})
        self._sweep()
        self._replay()
        self._key = key_of(self.sentence, self._settings(), timeline_svg(self.timeline, DRAWN))
        self._draw()
        self._stored, self._plain = self._static_html(), self._static_text()
        for sliders in self._sliders.values():
            sliders.bandwidth.observe(self._bandwidth_moved, "value")
            sliders.latency.observe(self._latency_moved, "value")
        self.device.observe(lambda change: self._change(True, device=change["new"]), "value")
        self.link.observe(lambda change: self._link_chosen(), "value")
        if self.choice is not None:
            self.choice.observe(lambda change: self._update(True), "value")
        self._show_sliders()

    def _rows(self) -> list:
        rows = [labelled("Device", self.device)]
        if self.choice is not None:
            rows += [widgets.Label(self._name), self.choice]
        if len(self._classes) > 1:
            rows.append(labelled("The sliders set the link", self.link))
        return rows + [sliders.box for sliders in self._sliders.values()]

    @property
    def recording(self) -> Recording:
        """The recording now shown."""
        return self.choices[self._chosen()]

    @property
    def bandwidth(self) -> widgets.FloatLogSlider:
        """The bandwidth slider now shown, in GB/s per direction."""
        return self._sliders[self.link.value].bandwidth

    @property
    def latency(self) -> widgets.FloatLogSlider:
        """The latency slider now shown, in us per message."""
        return self._sliders[self.link.value].latency

    def _lanes(self, slider) -> np.ndarray:
        """The bandwidths of the curve, bytes/s: with several choices every notch, so that a move finds its step times there."""
        return 1e9 * (notches_of(slider) if self._named_choices else np.logspace(slider.min, slider.max, POINTS))

    def _chosen(self) -> str:
        return next(iter(self.choices)) if self.choice is None else self.choice.value

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
            if sweeps or self._frame is None:
                self._sweep()
            self._replay()
        except Exception as error:  # whatever it is, the reader sees it where the picture was, and `error` keeps it
            self.error, self.timeline, self._frame = error, None, None
            self.sentence = f"This cannot be replayed. {type(error).__name__}: {error}"
        self._draw()

    # ---- computing -------------------------------------------------------------------------------------------------

    def _replay(self) -> None:
        self.timeline = replay(self.recording, self.cluster)
        self.sentence, self.error = sentence(self.timeline), None
        if self._named_choices:
            self._comparison = self._compare()
        if len(self.choices) > 1:
            self.sentence += f" {self._comparison.finding()}"

    def _compare(self) -> Comparison:
        link, names = self.link.value, tuple(self.choices)
        times, here = self._prices.over(self.cluster, link), self._prices.here(self.cluster, link)
        shown, lanes = names.index(self._chosen()), self._prices.bandwidths[link]
        return Comparison(self._name, names, shown, lanes, times, here, self._prices.compute(self.cluster))

    def _sweep(self) -> None:
        axis = f"bandwidth {LINK_CLASSES[self.link.value]}, GB/s per direction"
        if self._named_choices:
            self._frame = choices_frame(self._compare(), axis)
        else:
            (times,) = self._prices.over(self.cluster, self.link.value)
            self._frame = curve_frame(self._prices.bandwidths[self.link.value], times, axis=axis)

    def _settings(self) -> str:
        parts = []
        for name in self._classes:
            link = getattr(self.cluster, name)
            parts.append(f"{LINK_CLASSES[name]} {link.title}, latency {format_time(link.latency)}")
        ranks = self.recording.world_size
        chosen = f"{self._name} {self._chosen()}: " if self._named_choices else ""
        on = f"{ranks} rank{'s' if ranks > 1 else ''} on {device_name(self.cluster.device)}"
        return f"{chosen}{on}; {'; '.join(parts)}."

    # ---- showing -----------------------------------------------------------------------------------------------------

    def _draw(self) -> None:
        self.picture.value = FITTED + hiding_rule(self._key) + self._body()

    def _words(self) -> str:
        lines = [paragraph(self.sentence, "font-weight:600"), paragraph(self._settings())]
        if len(self.choices) > 1 and self.timeline is not None:
            lines.append(paragraph(self._comparison.turns(LINK_CLASSES[self.link.value])))
        return f'<div role="status" style="min-height:{150 if self._named_choices else 90}px">{"".join(lines)}</div>'

    def _body(self) -> str:
        """Everything that changes; every part keeps its size, also when a replay fails or a choice has fewer ranks."""
        if self.timeline is not None:
            self._pictures = (
                timeline_svg(self.timeline, DRAWN),
                self._frame.svg(getattr(self.cluster, self.link.value).bandwidth, self.timeline.step_time),
                choices_svg(self._comparison) if self._named_choices else breakdown_svg(self.timeline),
            )
        timeline, left, right = self._pictures
        hidden = "" if self.timeline is not None else "visibility:hidden;"
        tallest = max(timeline_height(r.world_size, DRAWN) for r in self.choices.values())
        parts = [
            f'<div class="fitted" style="aspect-ratio:{DRAWN}/{tallest}">{timeline}</div>',
            '<div style="display:flex;flex-wrap:wrap;gap:4px">'
            f'<div style="flex:440 1 340px;min-width:0">{left}</div><div style="flex:300 1 250px;min-width:0">{right}</div></div>',
        ]
        if self._named_choices:
            parts.reverse()  # the choice is the question, and timelines of few ranks leave room that nobody sees at the end
        return (
            f'<div style="background:#fff;color:#1a1a1a;padding:8px;line-height:1.4;font-size:13px">{self._words()}'
            f'<div style="{hidden}">{"".join(parts)}</div></div>'
        )

    def _static_html(self) -> str:
        timeline, left, right = self._pictures
        last = f"Step time by {self._name}" if self._named_choices else "Where each rank's step goes"
        pictures = [image(timeline, self.sentence), image(left, self._frame.description), image(right, last)]
        pictures = (pictures[1:] + pictures[:1]) if self._named_choices else pictures
        pictures.append(paragraph("Run this cell to move the link under the picture.", "font-style:italic"))
        return (
            f'<div style="background:#fff;color:#1a1a1a;padding:8px;max-width:{WIDTH}px">{self._words()}{"".join(pictures)}</div>'
        )

    def _static_text(self) -> str:
        lines = [self.sentence, self._settings()]
        return "\n".join(lines + [self._comparison.text()] if self._named_choices else lines)

    def _ipython_display_(self, **options) -> None:
        show(self, self._stored, self._plain, self._key)

    def __repr__(self) -> str:
        sizes = sorted({r.world_size for r in self.choices.values()})
        ranks = f"{sizes[0]} rank{'s' if sizes[0] > 1 else ''}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]} ranks"
        of = f"{len(self.choices)} recordings of {ranks}" if len(self.choices) > 1 else ranks
        return f"Explorer of {of}; its sliders appear where a kernel runs"
