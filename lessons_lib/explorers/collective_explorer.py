"""The widget of lesson 02: algorithms of a collective side by side, for any number of ranks, size and link. All predicted."""

from __future__ import annotations

import math
from html import escape

import ipywidgets as widgets

from ..algorithms import algorithms_of
from ..formulas import algbw, busbw, crossover
from ..hardware import LINKS, Link, number, rate, whole
from ..plots.collective_picture import STYLES, Scene, busbw_svg, sample_svg, times_svg
from ..plots.svg import image
from ..plots.wording import format_time, percent
from ..replay.timeline import size_text
from ..stored import hiding_rule, key_of, paragraph, show
from .sliders import LinkSliders, labelled, moved, notched, slider_range

__all__ = ["CollectiveExplorer", "compare_collectives"]

WIDTH = 760
COLLECTIVES = ("all_reduce", "broadcast")
FIRST_SHOWN = {
    "all_reduce": ("naive", "binomial tree", "ring", "two trees in small parts"),
    "broadcast": ("naive", "binomial tree", "chain in small parts"),
}
COLUMNS = ("algorithm", "latencies", "buffers", "time", "algbw", "busbw", "of the link")
CELL = "padding:1px 8px;white-space:nowrap;text-align:"
RANKS = (2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024)
ROUND = (1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8)
SIZES = tuple(round(r * 10**k) for k in range(3, 10) for r in ROUND) + (10**10,)  # bytes


def compare_collectives(link: Link, ranks: int = 8, nbytes: float = 1e6, collective: str = "all_reduce") -> CollectiveExplorer:
    """A widget that compares the algorithms of a collective: predicted time against size, where they cross, algbw and busbw.

    `ranks` (2 to 1,024) and `nbytes` (1 kB to 10 GB) start at the nearest notch of their slider. `collective` is "all_reduce" or
    "broadcast". Without a kernel the saved notebook shows the first picture and its finding as text.
    """
    if not isinstance(link, Link):
        raise TypeError(f"The link must be a hardware.Link, such as hardware.NVLINK4 or Link(10e9, 5e-6), not {link!r}.")
    ranks = whole(ranks, "The number of ranks", RANKS[0], RANKS[-1])
    nbytes = number(nbytes, "The size of the buffer", "a positive number of bytes, 1e3 to 1e10")
    if not SIZES[0] <= nbytes <= SIZES[-1]:
        raise ValueError(f"The size of the buffer is {nbytes:g}, but must be a number of bytes from 1e3 to 1e10.")
    if collective not in COLLECTIVES:
        raise ValueError(f"There is no picture for {collective!r}; choose one of {', '.join(COLLECTIVES)}.")
    return CollectiveExplorer(link, ranks, nbytes, collective)


class CollectiveExplorer(widgets.VBox):
    """What `compare_collectives` returns. `sentence` is the finding now shown, `scene` what is compared.

    `ranks`, `size` (bytes), `bandwidth` (GB/s per direction) and `latency` (us) are the sliders, `collective` the choice of a
    collective, `boxes` (by collective and name) which algorithms are shown, `picture` the HTML below.
    """

    def __init__(self, link: Link, ranks: int, nbytes: float, collective: str):
        self._given = link
        self.collective = widgets.ToggleButtons(options=list(COLLECTIVES), value=collective)
        self.boxes, self._rows = {}, {}
        for name in COLLECTIVES:
            chosen = {a: _box(a, a in FIRST_SHOWN[name]) for a in algorithms_of(name)}
            self.boxes.update({(name, a): box for a, box in chosen.items()})
            self._rows[name] = widgets.HBox(list(chosen.values()), layout={"flex_flow": "row wrap"})
        self.ranks = notched([(f"{n:,}", n) for n in RANKS], min(RANKS, key=lambda n: abs(math.log(n / ranks))))
        self.size = notched([(size_text(s), s) for s in SIZES], min(SIZES, key=lambda s: abs(math.log(s / nbytes))))
        ranges = slider_range([link.bandwidth / 1e9], 0, 3), slider_range([link.latency * 1e6], -1, 3)
        self._link = LinkSliders(link, *ranges, "between two ranks")
        self.bandwidth, self.latency = self._link.bandwidth, self._link.latency
        self._now = link
        self.picture = widgets.HTML(layout={"width": "100%", "margin": "6px 0 0 0"})
        sized = [widgets.Label("Size of the full buffer"), self.size, widgets.Label("Number of ranks"), self.ranks]
        super().__init__(
            [labelled("Collective", self.collective), *self._rows.values(), *sized, self._link.box, self.picture],
            layout={"max_width": f"{WIDTH}px", "width": "100%"},
        )
        self._look()
        self._key = key_of(*self._words(), times_svg(self.scene))
        self._draw()
        self._stored, self._plain = self._static_html(), "\n".join([*self._words(), self._table_text()])
        for control in (self.collective, self.ranks, self.size, *self.boxes.values()):
            control.observe(self._changed, "value")
        self.bandwidth.observe(self._link_moved, "value")
        self.latency.observe(self._link_moved, "value")

    # ---- what the reader does ------------------------------------------------------------------------------------

    def _changed(self, change) -> None:
        self._look()
        self._draw()

    def _link_moved(self, change) -> None:
        link = moved(change, self._now, change["owner"] is self.latency, (self._given, *LINKS))
        if link is not None:
            self._now = link
            self._changed(change)

    # ---- computing -------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        name = self.collective.value
        for other, row in self._rows.items():
            row.layout.display = None if other == name else "none"
        table = algorithms_of(name)
        shown = [a for a in table if self.boxes[name, a].value] or [next(iter(table))]
        styles = {table[a]: STYLES[list(table).index(a)] for a in shown}
        self.scene = Scene(styles, self.ranks.value, self._now.bandwidth, self._now.latency, float(self.size.value))
        self.sentence = self._words()[0]

    def _words(self) -> list[str]:
        """The finding, who is the fastest at which size and why, and what the link does to a ring."""
        scene, n = self.scene, self.scene.members
        best = min(scene.styles, key=lambda a: (scene.time(a), a.cost(n)[1]))
        finding = f"Predicted: {best.name} is the fastest here, {format_time(scene.time(best))}"
        others = [a for a in scene.styles if a is not best]
        if others:
            worst = max(others, key=scene.time)
            finding += f"; {worst.name} takes {plain(scene.time(worst) / scene.time(best))} times as long"
        link = f"{n:,} ranks, {size_text(scene.nbytes)}, {self._now.title}, latency {format_time(scene.latency)}."
        if self.collective.value == "all_reduce":
            equal = size_text(crossover(n, scene.bandwidth, scene.latency))
            link += f" A ring's latencies and bytes cost the same at n x latency x bandwidth = {equal}."
        return [finding + ".", self._why(), link]

    def _why(self) -> str:
        """Which of those shown is the fastest at which size, and what it pays."""
        stretches, n = self.scene.stretches(), self.scene.members
        costs = [(f"{steps:,}", plain(volume)) for steps, volume in (a.cost(n) for _, a in stretches)]
        first = "{} latencies and {} x the buffer".format(*costs[0])
        if len(stretches) == 1:
            return f"Of those shown, {stretches[0][1].name} is the fastest at every size: {first}."
        turns = [f"{a.name} up to {size_text(end)}" for (_, a), (end, _) in zip(stretches, stretches[1:])]
        later = ", then ".join([first, *(f"{steps} and {volume}" for steps, volume in costs[1:])])
        return (
            f"Fastest: {', '.join(turns)}, {stretches[-1][1].name} above. The larger, the fewer bytes at more latencies: {later}."
        )

    def _rows_of_table(self) -> list[tuple]:
        scene, rows = self.scene, []
        for a in scene.styles:
            seconds = scene.time(a)
            bus = busbw(a.collective, scene.nbytes, scene.members, seconds)
            steps, volume = a.cost(scene.members)
            rows.append((a, f"{steps:,}", plain(volume), format_time(seconds), rate(algbw(scene.nbytes, seconds)), rate(bus),
                         percent(bus / scene.bandwidth)))  # fmt: skip
        return rows

    # ---- showing -----------------------------------------------------------------------------------------------------

    def _draw(self) -> None:
        self.picture.value = hiding_rule(self._key) + self._body(times_svg(self.scene), busbw_svg(self.scene))

    def _body(self, left: str, right: str) -> str:
        return (
            f'<div style="background:#fff;color:#1a1a1a;padding:8px;line-height:1.4;font-size:13px">{self._words_html()}'
            f'<div style="display:flex;flex-wrap:wrap;gap:4px"><div style="flex:440 1 340px;min-width:0">{left}</div>'
            f'<div style="flex:300 1 250px;min-width:0">{right}</div></div>{self._table_html()}</div>'
        )

    def _words_html(self) -> str:
        first, *rest = self._words()
        lines = paragraph(first, "font-weight:600") + "".join(paragraph(words) for words in rest)
        return f'<div role="status" style="min-height:158px">{lines}</div>'

    def _table_html(self) -> str:
        head = "".join(f'<th style="{CELL}{"right" if k else "left"}">{words}</th>' for k, words in enumerate(COLUMNS))
        body = ""
        for a, *cells in self._rows_of_table():
            body += f'<tr><td style="{CELL}left">{sample_svg(self.scene.styles[a])} {escape(a.name)}</td>'
            body += "".join(f'<td style="{CELL}right">{cell}</td>' for cell in cells) + "</tr>"
        look = "border-collapse:collapse;font-size:12px;margin:4px 0;color:#1a1a1a"
        table = f'<table style="{look}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
        return f'<div style="overflow-x:auto;width:0;min-width:100%;min-height:176px">{table}</div>'

    def _table_text(self) -> str:
        rows = [COLUMNS, *((a.name, *cells) for a, *cells in self._rows_of_table())]
        widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
        return "\n".join("  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:]))]) for row in rows)

    def _static_html(self) -> str:
        pictures = [image(times_svg(self.scene), self.sentence), image(busbw_svg(self.scene), "Predicted bus bandwidth")]
        pictures.append(self._table_html())
        pictures.append(paragraph("Run this cell to move size, ranks and link.", "font-style:italic"))
        look = f"background:#fff;color:#1a1a1a;padding:8px;max-width:{WIDTH}px"
        return f'<div style="{look}">{self._words_html()}{"".join(pictures)}</div>'

    def _ipython_display_(self, **options) -> None:
        show(self, self._stored, self._plain, self._key)

    def __repr__(self) -> str:
        return "Explorer of collectives; its sliders appear where a kernel runs"


def plain(value: float) -> str:
    """Three digits without an exponent, and without zeros at the end: 1.75, 7, 2,046."""
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


def _box(name: str, shown: bool) -> widgets.Checkbox:
    return widgets.Checkbox(shown, description=name, indent=False, layout={"width": "max-content", "margin": "0 14px 0 2px"})
