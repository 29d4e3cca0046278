"""The widget of lesson 05: pipeline schedules of a model over any link. A recording is made from the schedule, and replayed.

Moving the link costs one replay; anything else a new recording, whose events are remembered by schedule, p and m.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace as changed

import ipywidgets as widgets

from ..hardware import H100, IB_NDR, LINKS, Cluster, Device, Link, number, whole
from ..plots.pipeline_panels import bubbles_svg, memory_svg
from ..plots.schedule_picture import pipeline_height, pipeline_svg
from ..plots.svg import image
from ..plots.text_pictures import timeline_text
from ..plots.wording import format_time
from ..replay import replay
from ..replay.timeline import size_text
from ..shapes import Shape
from ..stored import hiding_rule, key_of, paragraph, show
from .pipeline_setting import INTERLEAVED, SCHEDULES, Setting, finding, room, slowest
from .sliders import LinkSliders, device_name, labelled, moved, notched, slider_range

__all__ = ["PipelineExplorer", "explore_pipeline"]

WIDTH = 760  # pixels of the whole widget
DRAWN = 700  # pixels of the timeline before it is fitted to the window
SOON = 0.04  # seconds from the picture to the panels
AREA = 288  # pixels of all its rows together, however many
STAGES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)
MICROBATCHES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64)
CHUNKS = (1, 2, 3, 4, 5, 6, 8)
RATIOS = tuple(k / 4 for k in range(2, 17))
# The words keep their room, also where they are narrow and so take more lines.
STYLE = (
    "<style>.fitted > svg{width:100%}.pipeline-outer{container-type:inline-size}.pipeline-words{min-height:156px}"
    "@container(max-width:640px){.pipeline-words{min-height:250px}}</style>"
)
PAPER = "background:#fff;color:#1a1a1a;padding:8px;line-height:1.4;font-size:13px;"


def explore_pipeline(
    shape: Shape, device: Device = H100, link: Link = IB_NDR, *, schedule: str = "1F1B", stages: int = 8, microbatches: int = 32,
    chunks: int = 2, ratio: float = 2.0, sequence: int | None = None, sequences: int = 1, recompute: str = "selective",
) -> PipelineExplorer:  # fmt: skip
    """A widget: a model of that shape in a pipeline over `stages` ranks of `device`, each joined to the next by `link`.

    A step has `microbatches`, each of `sequences` sequences of `sequence` tokens (None: 2,048, or as long as the shape takes).
    `schedule` is "GPipe", "1F1B", "interleaved 1F1B" (with `chunks` stages on each rank) or "ZB-H1". `ratio`: backward / forward, 2
    without recomputation, 3 with all of it. `recompute` is what the memory assumes: "none", "selective" or "full".
    """
    if not isinstance(shape, Shape):
        raise TypeError(f"The shape must be one such as shapes.LLAMA3_70B, not {shape!r} (a {type(shape).__name__}).")
    if not isinstance(device, Device):
        raise TypeError(f"The device must be a hardware.Device, such as hardware.H100, not {device!r}.")
    if not isinstance(link, Link):
        raise TypeError(f"The link must be a hardware.Link, such as hardware.IB_NDR or Link(50e9, 4e-6), not {link!r}.")
    if not isinstance(schedule, str) or schedule not in SCHEDULES:
        raise ValueError(f"There is no schedule {schedule!r} here; choose one of {', '.join(map(repr, SCHEDULES))}.")
    stages = whole(stages, "stages (ranks of the pipeline)", 1, 64)
    microbatches = whole(microbatches, "microbatches (of a step)", 1, 256)
    chunks = whole(chunks, "chunks (stages on each rank)", 1, 16)
    ratio = number(ratio, "ratio (backward / forward)", "a number from 0.1 to 10")
    if not 0.1 <= ratio <= 10:
        raise ValueError(f"ratio (backward / forward) is {ratio:g}, but must be a number from 0.1 to 10.")
    sequence = min(2048, shape.length) if sequence is None else whole(sequence, "sequence (tokens)", 1, shape.length)
    sequences = whole(sequences, "sequences (of a microbatch)", 1, 10_000)
    setting = Setting(shape, device, sequence, sequences, schedule, stages, microbatches, chunks, ratio, recompute)
    setting.told(), setting.memory  # what cannot be is said at once
    return PipelineExplorer(setting, link)


class PipelineExplorer(widgets.VBox):
    """What `explore_pipeline` returns. `setting`, `link`, `timeline`, `sentence` are those now shown; `error` is why there is none.

    `schedule` is the choice of a schedule; `stages`, `microbatches`, `chunks`, `ratio`, `bandwidth` (GB/s per direction) and
    `latency` (us) are the sliders, `picture` the HTML below them (words, timeline), `panels` the HTML below that (memory, bubbles).
    """

    def __init__(self, setting: Setting, link: Link):
        self.setting, self.link, self._given = setting, link, link
        self.error: Exception | None = None
        self._later = None  # the panels that are still to be drawn
        self.schedule = widgets.ToggleButtons(options=list(SCHEDULES), value=setting.schedule, style={"button_width": "auto"})
        self.stages = _slider(STAGES, setting.stages)
        self.microbatches = _slider(MICROBATCHES, setting.microbatches)
        self.chunks = _slider(CHUNKS, setting.chunks)
        self.ratio = _slider(RATIOS, setting.ratio)
        ranges = slider_range([link.bandwidth / 1e9], 0, 3), slider_range([link.latency * 1e6], -1, 3)
        self._link = LinkSliders(link, *ranges, "", track=240.0)
        self.bandwidth, self.latency = self._link.bandwidth, self._link.latency
        self.picture = widgets.HTML(layout={"width": "100%", "margin": "6px 0 0 0"})
        self.panels = widgets.HTML(layout={"width": "100%", "margin": "0"})  # apart: it comes later, and not for a move of the link
        rates, delays = self._link.box.children[:3], self._link.box.children[3:]
        rows = [
            labelled("Schedule", self.schedule),
            _beside([widgets.Label("Stages p, one a rank"), self.stages], [widgets.Label("Microbatches m"), self.microbatches]),
            _beside(
                [widgets.Label("Chunks v a rank (interleaved)"), self.chunks],
                [widgets.Label("Backward takes this many forwards"), self.ratio],
            ),
            _beside(rates, delays),
        ]
        super().__init__([*rows, self.picture, self.panels], layout={"max_width": f"{WIDTH}px", "width": "100%"})
        self._replay()
        self._key = key_of(*self._lines(), self._timeline_svg())
        self._draw()
        self._draw_panels()
        self._stored, self._plain = self._static_html(), "\n".join([*self._lines(), *timeline_text(self.timeline).splitlines()[2:]])
        for control in (self.schedule, self.stages, self.microbatches, self.chunks, self.ratio):
            control.observe(self._set, "value")
        self.bandwidth.observe(self._link_moved, "value")
        self.latency.observe(self._link_moved, "value")

    # ---- what the reader does ------------------------------------------------------------------------------------

    def _set(self, change) -> None:
        names = ("schedule", "stages", "microbatches", "chunks", "ratio")
        self.setting = changed(self.setting, **{name: getattr(self, name).value for name in names})
        self._update()
        self._panels_soon()

    def _link_moved(self, change) -> None:
        link = moved(change, self.link, change["owner"] is self.latency, (self._given, *LINKS))
        if link is not None:
            self.link = link
            self._update()

    def _update(self) -> None:
        try:
            self._replay()
        except ValueError as error:  # a combination that cannot be
            self.error, self.timeline, self.sentence = error, None, f"This combination cannot run. {error}"
        except Exception as error:  # whatever it is, the reader sees it where the picture was, and `error` keeps it
            self.error, self.timeline, self.sentence = error, None, f"This cannot be replayed. {type(error).__name__}: {error}"
        self._draw()

    # ---- computing -------------------------------------------------------------------------------------------------

    @property
    def cluster(self) -> Cluster:
        """A device for each stage, every two neighbours joined by the same link."""
        return Cluster(self.setting.device, devices_per_node=self.setting.stages, intra_node=self.link)

    def _replay(self) -> None:
        self.timeline = replay(self.setting.recording, self.cluster)
        self.sentence = finding(self.timeline, self.setting)
        self.error = None

    def _lines(self) -> list[str]:
        if self.timeline is None:
            return [self.sentence]
        s, size = self.setting, size_text(self.setting.message_bytes)
        link = f"between stages {self.link.title}, latency {format_time(self.link.latency)}, {size} a message"
        return [self.sentence, f"{s.told()}{slowest(self.timeline)}; on {device_name(s.device)}; {link}.", room(s)]

    # ---- showing -----------------------------------------------------------------------------------------------------

    def _timeline_svg(self) -> str:
        chunks = self.setting.chunks if self.setting.schedule == INTERLEAVED else 1
        return pipeline_svg(self.timeline, chunks, DRAWN, area=AREA)

    def _draw(self) -> None:
        if self.timeline is not None:
            self._drawn = self._timeline_svg()
        hidden = "" if self.timeline is not None else "visibility:hidden;"
        place = f"{hidden}aspect-ratio:{DRAWN}/{pipeline_height(8, width=DRAWN, area=AREA)}"
        self.picture.value = (
            f'{STYLE}{hiding_rule(self._key)}<div class="pipeline-outer" style="{PAPER}">'
            f'<div role="status" class="pipeline-words">{self._words()}</div>'
            f'<div class="fitted" style="{place}">{self._drawn}</div></div>'
        )

    def _words(self) -> str:
        first, *rest = self._lines()
        return paragraph(first, "font-weight:600") + "".join(paragraph(line) for line in rest)

    def _panels_soon(self) -> None:
        """Draw the panels when the picture has been sent; of several moves in a row, only for the last."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # no kernel: nobody waits for the picture
            self._draw_panels()
            return
        if self._later is not None:
            self._later.cancel()
        self._later = loop.call_later(SOON, self._draw_panels)

    def _draw_panels(self) -> None:
        """What does not change with the link."""
        now = self.setting
        if self.timeline is not None:
            memory = memory_svg([one.states for one in now.memory], [one.activations for one in now.memory], now.device.memory)
            self._beneath = memory, bubbles_svg(now.compared, now.schedule)
        hidden = "" if self.timeline is not None else "visibility:hidden;"
        left, right = self._beneath
        self.panels.value = (
            f'<div style="{PAPER}{hidden}display:flex;flex-wrap:wrap;gap:4px">'
            f'<div style="flex:440 1 340px;min-width:0">{left}</div><div style="flex:300 1 250px;min-width:0">{right}</div></div>'
        )

    def _static_html(self) -> str:
        left, right = self._beneath
        finding, _, memory = self._lines()
        pictures = [image(self._drawn, finding), image(left, memory), image(right, "The schedules without a link")]
        pictures.append(paragraph("Run this cell to move schedule, stages, microbatches and link.", "font-style:italic"))
        return f'<div style="{PAPER}max-width:{WIDTH}px">{self._words()}{"".join(pictures)}</div>'

    def _ipython_display_(self, **options) -> None:
        show(self, self._stored, self._plain, self._key)

    def __repr__(self) -> str:
        return "Explorer of pipelines; its sliders appear where a kernel runs"


def _slider(notches, value) -> widgets.SelectionSlider:
    """A slider over these numbers, and the one that was given."""
    return notched([(f"{n:g}", n) for n in sorted({*notches, value})], value)


def _beside(*columns) -> widgets.HBox:
    """Controls side by side, or below each other where the page is narrow."""
    boxes = [widgets.VBox(list(column), layout={"flex": "1 1 300px", "min_width": "0"}) for column in columns]
    return widgets.HBox(boxes, layout={"flex_flow": "row wrap", "width": "100%"})
