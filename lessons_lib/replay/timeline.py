"""A timeline: what every rank does from 0 to the end of the step, and every transfer. Made by a replay or from measured times.

The numbers are kept as numpy columns (thousands of spans are quick to draw); `spans` and `transfers` are the same as objects.
Imports no torch and no plotting library.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..recording import Table

COMPUTING, COMMUNICATING, IDLE = 0, 1, 2
KINDS = ("compute", "communication", "idle")


@dataclass(frozen=True)
class Span:
    """What one rank does from `start` to `end` (seconds). `kind`: "compute", "communication" or "idle".

    `label` is the innermost record_function, else the operation's name; `detail` says what it was: "send 8.0 MB to rank 1".
    """

    rank: int
    start: float
    end: float
    kind: str
    label: str = ""
    detail: str = ""

    @property
    def duration(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Transfer:
    """One message or collective moving from `start` to `end` (seconds). `ranks`: (sender, receiver), or all members."""

    start: float
    end: float
    ranks: tuple[int, ...]
    label: str  # "send", "all_reduce", ...
    nbytes: int

    @property
    def duration(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Picture:
    """A picture and the same in letters."""

    svg: str
    text: str

    def _repr_svg_(self) -> str:
        return self.svg

    def _repr_html_(self) -> str:
        """The same, narrower where the page is: JupyterLab shows bare SVG in its full width and cuts off the rest."""
        from .. import plots

        return plots.image(self.svg, self.text.splitlines()[0])

    def __repr__(self) -> str:
        return self.text


@dataclass(frozen=True, eq=False)
class Timeline:
    """All ranks from 0 to `step_time` (seconds). `kind` is "replayed" (virtual time) or "measured" (wall clock).

    `columns`: one row a span, by rank and time: rank, start, end, kind (0 compute, 1 communication, 2 idle), label (index into
    `labels`, -1 none), detail (index into `details`). A rank's spans follow each other without a gap. Communication is a rank that
    waits while something of its own is moving (exposed communication); idle is one that waits for others, or has finished.

    `transfer_columns`: one row a transfer, by start: start, end, source, destination (-1: a collective), group (index into
    `groups`), nbytes, operation (index into `operations`), wire (0 inside a node, 1 across nodes, 2 both).
    """

    kind: str
    title: str
    world_size: int
    step_time: float
    columns: dict[str, np.ndarray]
    labels: list[str]
    details: list[str]
    transfer_columns: dict[str, np.ndarray]
    operations: list[str]
    groups: list[tuple[int, ...]]
    _path: Callable[[], list[Span]]

    @cached_property
    def spans(self) -> list[Span]:
        """The columns as objects."""
        names = [_operation(detail) for detail in self.details]
        rows = zip(*(self.columns[name].tolist() for name in ("rank", "start", "end", "kind", "label", "detail")))
        return [
            Span(rank, start, end, KINDS[kind], self.labels[label] if label >= 0 else names[detail], self.details[detail])
            for rank, start, end, kind, label, detail in rows
        ]

    @cached_property
    def transfers(self) -> list[Transfer]:
        """The transfer columns as objects: also those that computation hides."""
        names = ("start", "end", "source", "destination", "group", "nbytes", "operation")
        return [
            Transfer(
                start, end, (source, destination) if destination >= 0 else self.groups[group], self.operations[op], int(nbytes)
            )
            for start, end, source, destination, group, nbytes, op in zip(*(self.transfer_columns[n].tolist() for n in names))
        ]

    def breakdown(self) -> Table:
        """Seconds per rank of compute, exposed communication and idle; the three sum to the step time."""
        length = self.columns["end"] - self.columns["start"]
        cells = self.columns["rank"] * 3 + self.columns["kind"]
        seconds = np.bincount(cells, length, minlength=3 * self.world_size).reshape(self.world_size, 3).astype(float)
        # The few units of rounding that a long sum gathers go to its largest part, so that the parts are exact.
        rows = np.arange(self.world_size)
        seconds[rows, seconds.argmax(axis=1)] += self.step_time - seconds.sum(axis=1)
        return Table(("rank", "compute", "communication", "idle"), [(r, *row) for r, row in enumerate(seconds.tolist())])

    def critical_path(self) -> list[Span]:
        """What held up the end: spans from 0 to the step time, each beginning where the one before ends, on whatever rank.

        Communication on the path is the transfer itself, on the rank that waited for it; shorten any part and the step may shorten.
        """
        return self._path()

    # ---- pictures: drawn by plots, which is imported only when asked for -----------------------------------------------

    def plot(self, **options) -> Picture:
        """The timeline as a picture (SVG in a notebook, letters in a terminal). `options` as of plots.timeline_svg."""
        from .. import plots

        return Picture(plots.timeline_svg(self, **options), plots.timeline_text(self))

    def to_perfetto(self, path) -> None:
        """Write a trace that ui.perfetto.dev opens."""
        from .. import plots

        plots.to_perfetto(self, path)

    def text(self, **options) -> str:
        """The timeline in letters, for a terminal or a screen reader."""
        from .. import plots

        return plots.timeline_text(self, **options)

    def _repr_svg_(self) -> str:
        from .. import plots

        return plots.timeline_svg(self)

    def _repr_html_(self) -> str:
        return self.plot()._repr_html_()

    def __repr__(self) -> str:
        return f"Timeline ({self.kind}): {self.title}, step time {seconds_text(self.step_time)}, {len(self.columns['rank'])} spans"


def build(
    *, kind, title, world_size, step_time, events, blocked, moving, transfer_columns, labels, details, operations, groups, path
) -> Timeline:
    """Cut every rank's time into spans.

    `events`: compute, columns rank, start, end, label. `blocked`: intervals in which a rank waits, by rank and time: rank, start,
    end, label, detail. `moving`: intervals in which something of a rank's own moves, any order: rank, start, end.
    """
    parts = [(*events, np.full(len(events[0]), COMPUTING), np.full(len(events[0]), len(details) - 1))]
    rank, start, end, label, detail = blocked
    edge = np.searchsorted(rank, np.arange(world_size + 1))
    by_rank = np.argsort(moving[0], kind="stable")
    moving = [column[by_rank] for column in moving]
    moving_edge = np.searchsorted(moving[0], np.arange(world_size + 1))
    for r in range(world_size):
        mine, own = slice(edge[r], edge[r + 1]), slice(moving_edge[r], moving_edge[r + 1])
        cut_start, cut_end, owner, is_moving = _cut(start[mine], end[mine], moving[1][own], moving[2][own])
        owner = owner + edge[r]
        cut_kind = np.where(is_moving, COMMUNICATING, IDLE)
        parts.append((np.full(len(owner), r), cut_start, cut_end, label[owner], cut_kind, detail[owner]))
    rank, start, end, label, kind_column, detail = (np.concatenate(column) for column in zip(*parts))
    keep = np.flatnonzero(end > start)
    keep = keep[np.lexsort((start[keep], rank[keep]))]
    columns = {"rank": rank, "start": start, "end": end, "kind": kind_column, "label": label, "detail": detail}
    columns = {name: column[keep] for name, column in columns.items()}
    by_start = np.lexsort((transfer_columns["source"], transfer_columns["start"]))
    transfer_columns = {name: column[by_start] for name, column in transfer_columns.items()}
    return Timeline(
        kind, title, world_size, float(step_time), columns, labels, details, transfer_columns, operations, groups, path
    )  # fmt: skip


def transfer_columns(m, start, end, wires) -> dict[str, np.ndarray]:
    """Columns of those transfers of a matching that took place: those whose start is not -1."""
    moved = np.flatnonzero(start >= 0)
    return {
        "start": start[moved], "end": end[moved], "source": m.source[moved], "destination": m.destination[moved],
        "group": m.group[moved], "nbytes": m.nbytes[moved].astype("i8"), "operation": m.op[moved] + 1, "wire": wires[moved],
    }  # fmt: skip


def _cut(start, end, move_start, move_end):
    """Cut intervals (disjoint, sorted) where movement (any intervals) begins or ends: (start, end, which interval, moving)."""
    if not len(start):
        return start, end, np.zeros(0, dtype=int), np.zeros(0, dtype=bool)
    order = np.argsort(move_start, kind="stable")
    move_start, reach = move_start[order], np.maximum.accumulate(move_end[order]) if len(order) else move_end
    opens = np.ones(len(reach), dtype=bool)
    opens[1:] = move_start[1:] > reach[:-1]
    heads = np.flatnonzero(opens)
    move_start = move_start[heads]  # the union of all movement: disjoint, sorted
    move_end = reach[np.concatenate([heads[1:], [len(reach)]]) - 1] if len(heads) else reach
    cuts = np.concatenate([move_start, move_end])
    inside = np.searchsorted(start, cuts, side="right") - 1
    within = (inside >= 0) & (cuts > start[inside]) & (cuts < end[inside])
    begins = np.concatenate([start, cuts[within]])
    owner = np.concatenate([np.arange(len(start)), inside[within]])
    order = np.argsort(begins, kind="stable")
    begins, owner = begins[order], owner[order]
    last = np.ones(len(owner), dtype=bool)
    last[:-1] = owner[1:] != owner[:-1]
    ends = np.where(last, end[owner], np.append(begins[1:], 0.0))
    run = np.searchsorted(move_start, begins, side="right") - 1
    moving = (run >= 0) & (begins < np.append(move_end, 0.0)[run])
    return begins, ends, owner, moving


def _operation(detail: str) -> str:
    return detail.split(" ", 1)[0] if detail else ""


def size_text(nbytes: float) -> str:
    """A number of bytes in words: 8e6 -> "8.0 MB". 1 MB = 1e6 bytes."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{int(nbytes)} B"


def seconds_text(seconds: float) -> str:
    """A time in words: 0.00123 -> "1.23 ms"."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.4g} {unit}"
    return f"{seconds * 1e9:.4g} ns"
