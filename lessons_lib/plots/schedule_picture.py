"""A pipeline schedule as SVG: a row a rank, a box an action with its microbatch's number in it.

schedule_svg draws the table itself, in slots; pipeline_svg the same from a timeline whose spans are labelled with actions, in
seconds, with what the link does. Forward is solid, backward has a dark foot, the gradient of the weights is hollow: nobody needs
the colours. A later chunk of the model on a rank is lighter. Boxes of one kind on a rank are one <path>, so thousands are quick.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from ..hardware import number, whole
from ..parallel.schedules import Schedule
from .svg import COLOURS, clip, document, line, text_width, ticks, write
from .timeline_picture import LEFT, RIGHT, TOP, axis_parts, choose_ranks, strokes, transfers_parts
from .wording import format_time

ACTION = re.compile(r"([FBW])(\d+)(?:\.(\d+))?")  # a label of a timeline: "F3", "B0", "W2", "F2.1"
KINDS = "FBW"
SHADES = {
    "F": ("#0072B2", "#4C9FD6", "#8CC4EA", "#BFDFF4"),
    "B": ("#CC79A7", "#D99BBE", "#E5BBD3", "#EFD5E3"),
    "W": ("#009E73", "#009E73", "#009E73", "#009E73"),
}
FOOT = "#6e2f52"  # of a backward
# ranks: at most so many -> pixels from row to row, height of a box, of a lane of transfers, font size of names, of numbers
_ROWS = (
    (4, 44, 28, 3.0, 12, 12), (8, 36, 22, 3.0, 12, 11), (16, 26, 15, 2.5, 11, 10), (32, 17, 9, 2.0, 10, 8), (64, 12, 6, 1.5, 9, 0),
)  # fmt: skip
SMALLEST = 8.0  # pixels of a number's letters: where even these do not fit, numbers are left out
_ENDS = (1.0, 1.12, 1.25, 1.4, 1.6, 1.8, 2.0, 2.24, 2.5, 2.8, 3.15, 3.55, 4.0, 4.5, 5.0, 5.6, 6.3, 7.1, 8.0, 9.0)
FINE = 0.5  # pixels: boxes narrower than this that begin at the same half pixel are drawn once


@dataclass(frozen=True, eq=False)
class Boxes:
    """Columns, one row an action: rank, start, end, kind (index into KINDS), microbatch, chunk."""

    rank: np.ndarray
    start: np.ndarray
    end: np.ndarray
    kind: np.ndarray
    microbatch: np.ndarray
    chunk: np.ndarray


def boxes_of(schedule: Schedule) -> Boxes:
    """The table of a schedule as columns."""
    times = np.array([(float(c.time), float(c.time + c.duration)) for c in schedule.cells]).reshape(-1, 2)
    numbers = np.array([(c.rank, KINDS.index(c.kind), c.microbatch, c.chunk) for c in schedule.cells], dtype=int).reshape(-1, 4)
    return Boxes(numbers[:, 0], times[:, 0], times[:, 1], *numbers[:, 1:].T)


def boxes_in(timeline) -> Boxes:
    """The computing of a timeline whose labels are actions. Computing with another label is left out."""
    read = [ACTION.fullmatch(label) for label in timeline.labels]
    table = np.array([(KINDS.index(r[1]), int(r[2]), int(r[3] or 0)) if r else (-1, 0, 0) for r in [*read, None]])
    columns = timeline.columns
    some = np.flatnonzero((columns["kind"] == 0) & (table[columns["label"], 0] >= 0))
    label, rank, start, end = (columns[name][some] for name in ("label", "rank", "start", "end"))
    # Several pieces of one action, one after the other, are one box.
    new = np.ones(len(some), dtype=bool)
    new[1:] = (label[1:] != label[:-1]) | (rank[1:] != rank[:-1]) | (start[1:] > end[:-1] * (1 + 1e-12))
    first = np.flatnonzero(new)
    last = np.append(first, len(some))[1:] - 1
    return Boxes(rank[first], start[first], end[last], *table[label[first]].T)


def schedule_svg(schedule: Schedule, width: int = 760, until: float | None = None) -> str:
    """The table as a picture, `width` pixels wide, with each rank's peak in flight beside its row. Time is in slots.

    `until` is where the time axis ends, for two pictures on one scale; without it, at the makespan.
    """
    if not isinstance(schedule, Schedule):
        raise TypeError(
            f"A Schedule is needed, from timed(...) or table_from(...), not {schedule!r} (a {type(schedule).__name__})."
        )
    width = whole(width, "The picture's width in pixels", 300, 10_000)
    span = float(schedule.makespan)
    if until is None:
        until = span or 1.0
    elif number(until, "until, the end of the time axis,", "a positive, finite number of slots, or left out") < span * (1 - 1e-9):
        raise ValueError(f"until is {until:g}, but this schedule takes {span:g} slots: name a time that is not shorter.")
    rows = list(range(min(schedule.ranks, _ROWS[-1][0])))
    pitch, bar, lane, font, size = _rows(len(rows))
    pitch -= 2 * lane + 2  # there are no transfers here
    beside = 78
    scale, bottom = (width - LEFT - RIGHT - beside) / until, TOP + 10 + pitch * len(rows)
    right = LEFT + until * scale
    boxes, (split, chunks) = boxes_of(schedule), (schedule.split, schedule.chunks) if schedule.cells else (False, 1)
    name, _, rest = schedule.summary.partition(": ")
    heading = 10 + text_width(name, 12) * 1.1 + 10
    names = [write(LEFT - 8, TOP + 10 + i * pitch + bar / 2 + font * 0.36, f"rank {r}") for i, r in enumerate(rows)]
    peaks = [str(peak) for peak in schedule.peak_in_flight]
    if split:
        peaks = [f"{peak} ({kept})" for peak, kept in zip(peaks, schedule.peak_kept)]
    told = [write(right + 40, TOP + 10 + i * pitch + bar / 2 + font * 0.36, peaks[r]) for i, r in enumerate(rows)]
    parts = [
        write(10, 18, name, font_weight="bold"),
        write(round(heading), 18, clip(rest.partition("; peak")[0], 11, width - heading), font_size=11),
        write(right + 40, TOP + 2, "in flight (kept)" if split else "in flight", text_anchor="middle", font_size=10),
        _slots("time" if isinstance(schedule.makespan, float) else "slot", until, scale, bottom),
        f'<g text-anchor="end" font-size="{font}">{"".join(names)}</g>',
        f'<g text-anchor="middle" font-size="{font}">{"".join(told)}</g>',
        *[_idle(LEFT, TOP + 10 + i * pitch + bar / 2, right) for i in range(len(rows))],
        *_drawn(boxes, rows, scale, pitch, bar, size, TOP + 10),
    ]
    if len(rows) < schedule.ranks:
        parts.append(write(right + 40, bottom + 16, f"first {len(rows)} of {schedule.ranks}", text_anchor="middle", font_size=10))
    legend, lines = _legend(split, chunks, False, bottom + 40, width)
    return document(width, bottom + 30 + 18 * lines, schedule.summary, [*parts, legend])


def pipeline_svg(timeline, chunks: int = 1, width: int = 760, until: float | None = None, area: float | None = None) -> str:
    """A timeline whose labels are actions, as boxes with numbers; exposed communication and transfers as in timeline_svg.

    `until` (seconds) is where the time axis ends; without it, shortly after the step. `area` (pixels) is the height
    that all rows share; without it, each row has what suits their number.
    """
    rows, _ = choose_ranks(timeline, None)
    width = whole(width, "The picture's width in pixels", 300, 10_000)
    step = timeline.step_time
    until = until or (_end(step) if step > 0 else 1e-9)
    pitch, bar, lane, font, size = _rows(len(rows), area)
    scale, bottom = (width - LEFT - RIGHT) / until, TOP + (area or pitch * len(rows))
    boxes = boxes_in(timeline)
    split = bool((boxes.kind == 2).any())
    title = f"{timeline.kind.capitalize()}: step {format_time(step)}"
    heading = 10 + text_width(title, 12) * 1.1 + 10
    names = [write(LEFT - 8, TOP + i * pitch + bar / 2 + font * 0.36, f"rank {r}") for i, r in enumerate(rows)]
    end = LEFT + step * scale
    parts = [
        write(10, 18, title, font_weight="bold"),
        write(round(heading), 18, clip(timeline.title, 12, width - heading)),
        axis_parts(until, scale, bottom),
        f'<g text-anchor="end" font-size="{font}">{"".join(names)}</g>',
        *[_idle(LEFT, TOP + i * pitch + bar / 2, end) for i in range(len(rows))],
        *_exposed(timeline, rows, scale, pitch, bar),
        *_drawn(boxes, rows, scale, pitch, bar, size, TOP),
        *transfers_parts(timeline, rows, scale, pitch, bar, lane, titled=0),
    ]
    if step > 0:
        parts.append(line(end, TOP - 4, end, bottom, "#1a1a1a", stroke_dasharray="2 2"))
    legend, lines = _legend(split, chunks, True, bottom + 44, width)
    told = f"{title}. {timeline.title}. A row a rank, a box an action with the number of its microbatch."
    return document(width, bottom + 34 + 18 * lines, told, [*parts, legend])


def pipeline_height(ranks: int, split: bool = True, chunks: int = 2, width: int = 760, area: float | None = None) -> float:
    """Pixels of the height of pipeline_svg; without split and chunks, of the tallest."""
    legend = 18 * _legend(split, chunks, True, 0, width)[1]
    return TOP + (area or _rows(min(ranks, _ROWS[-1][0]))[0] * min(ranks, _ROWS[-1][0])) + 34 + legend


def _end(step: float) -> float:
    """Where an axis for this step ends: at most an eighth later, since numbers need room, and seldom elsewhere."""
    power = 10.0 ** np.floor(np.log10(step))
    return float(next(e * power for e in (*_ENDS, 10.0, 11.2) if step <= e * power * (1 + 1e-9)))


def _rows(count: int, area: float | None = None) -> tuple[float, float, float, float, float]:
    """Pixels from row to row, of a box, of a lane of transfers, of the letters of names and of numbers, for so many rows."""
    rows = next(row[1:] for row in _ROWS if count <= row[0])
    if area is None:
        return rows
    pitch = min(area / count, 72.0)
    return pitch, round(0.62 * pitch, 1), min(3.0, 0.09 * pitch), rows[3], min(12.0, np.floor(0.55 * pitch)) if rows[4] else 0


# ---- the parts of a picture --------------------------------------------------------------------------------------------------


def _idle(left: float, y: float, right: float) -> str:
    return line(left, y, round(right, 1), y, COLOURS["idle"], stroke_width=1.5, stroke_dasharray="1.5 3")


def _drawn(boxes: Boxes, rows: list[int], scale: float, pitch: float, bar: float, size: float, top: float) -> list[str]:
    """All boxes, row by row, and the numbers in those that are wide enough."""
    x0, wide = boxes.start * scale, (boxes.end - boxes.start) * scale
    shade = boxes.chunk % 4
    look = boxes.kind * 4 + shade
    order = np.lexsort((x0, look, boxes.rank))
    paths: dict[int, list[str]] = {rank: [] for rank in rows}
    if len(order):
        edges = np.flatnonzero(np.diff(boxes.rank[order] * 12 + look[order], prepend=-1, append=-1))
        for a, b in zip(edges, edges[1:]):
            some = order[a:b]
            rank, (kind, lighter) = int(boxes.rank[some[0]]), divmod(int(look[some[0]]), 4)
            if rank in paths:
                paths[rank].append(_path(KINDS[kind], lighter, _stroked(x0[some], wide[some]), bar))
    middle = {rank: top + i * pitch + bar / 2 for i, rank in enumerate(rows)}
    out = [
        f'<g transform="translate({LEFT} {middle[rank]:g}) scale(.1)" fill="none">{"".join(drawn)}</g>'
        for rank, drawn in paths.items()
    ]
    at = (LEFT + x0 + wide / 2).tolist()
    for font, some, words in _numbers(boxes, wide, size):
        told: dict[str, list[str]] = {"#fff": [], "#1a1a1a": []}
        for j, rank, white in zip(some.tolist(), boxes.rank[some].tolist(), (look[some] == 0).tolist()):
            if rank in middle:
                told["#fff" if white else "#1a1a1a"].append(
                    f'<text x="{at[j]:.1f}" y="{middle[rank] + font * 0.36:.1f}">{words[j]}</text>'
                )
        for colour, texts in told.items():
            if texts:
                style = f'font-size="{font:g}" text-anchor="middle" fill="{colour}" pointer-events="none"'
                out.append(f'<g class="numbers" {style}>{"".join(texts)}</g>')
    return out


def _stroked(x0: np.ndarray, wide: np.ndarray) -> str:
    """A path of boxes as thick strokes (tenths of a pixel); neighbours stay apart where they are wide enough to be seen as two."""
    fine = wide < FINE
    if fine.any():
        keep = ~fine
        keep[np.unique(np.where(fine, np.floor(x0 / FINE), -1 - np.arange(len(x0))), return_index=True)[1]] = True
        x0, wide = x0[keep], wide[keep]
    start, end = np.rint(x0 * 10).astype(int), np.rint((x0 + wide) * 10).astype(int)
    gap = np.where(end - start > 60, 8, np.where(end - start > 25, 5, 0))
    return strokes(start, np.maximum(end - start - gap, 1))


def _path(kind: str, shade: int, d: str, bar: float) -> str:
    colour, tall = SHADES[kind][shade], 10 * bar
    if kind == "F":
        return f'<path class="F" d="{d}" stroke="{colour}" stroke-width="{tall:g}"/>'
    if kind == "B":
        foot = f'<path d="{d}" stroke="{FOOT}" stroke-width="{0.14 * tall:g}" transform="translate(0 {0.43 * tall:g})"/>'
        return f'<path class="B" d="{d}" stroke="{colour}" stroke-width="{tall:g}"/>{foot}'
    inside = f'<path d="{d}" stroke="#fff" stroke-width="{0.56 * tall:g}"/>'
    return f'<path class="W" d="{d}" stroke="{colour}" stroke-width="{0.84 * tall:g}"/>{inside}'


def _numbers(boxes: Boxes, wide: np.ndarray, size: float) -> list[tuple[float, np.ndarray, dict]]:
    """What is written into the boxes, as (pixels of the letters, boxes, words by box).

    "F3" and its like if they fit into every box; else, kind by kind, "3", in letters as small as need be, or nothing at all.
    """
    if not size or not len(wide):
        return []
    numbers, kinds, chunks = boxes.microbatch.tolist(), boxes.kind.tolist(), boxes.chunk.tolist()
    longest = "F" + "8" * len(str(max(numbers))) + (".8" if max(chunks) else "")
    if wide.min() >= text_width(longest, size) + 3:
        words = {j: f"{KINDS[k]}{i}" + (f".{c}" if c else "") for j, (k, i, c) in enumerate(zip(kinds, numbers, chunks))}
        return [(size, np.arange(len(wide)), words)]
    found, words = [], dict(enumerate(numbers))
    for kind in range(3):
        some = np.flatnonzero(boxes.kind == kind)
        if len(some):
            room = (wide[some].min() - 0.6) / text_width("8" * len(str(max(numbers))), 1)
            if room >= SMALLEST:
                found.append((min(size, np.floor(2 * room) / 2), some, words))
    return found


def _exposed(timeline, rows: list[int], scale: float, pitch: float, bar: float) -> list[str]:
    """Waiting while something of the rank's own moves: striped, as in a timeline."""
    columns, out = timeline.columns, []
    moving = columns["kind"] == 1
    for i, rank in enumerate(rows):
        some = moving & (columns["rank"] == rank)
        x0, x1 = columns["start"][some] * scale * 10, columns["end"][some] * scale * 10
        if len(x0):
            d = strokes(np.rint(x0).astype(int), np.maximum(np.rint(x1 - x0).astype(int), 1))
            look = f'stroke="{COLOURS["communication"]}" stroke-width="{5 * bar:g}" stroke-dasharray="35 15" fill="none"'
            place = f'transform="translate({LEFT} {TOP + i * pitch + bar / 2:g}) scale(.1)"'
            out.append(f'<path class="communication" d="{d}" {look} {place}/>')
    return out


def _slots(unit: str, until: float, scale: float, bottom: float) -> str:
    """The time axis in the schedule's own unit."""
    parts, names = [line(LEFT, bottom + 2, LEFT + until * scale, bottom + 2, "#1a1a1a")], []
    for t in ticks(until, 12):
        x = round(LEFT + t * scale, 1)
        parts.append(line(x, bottom + 2, x, bottom + 6, "#1a1a1a"))
        names.append(write(x, bottom + 18, f"{t:g}"))
    names.append(write(LEFT - 8, bottom + 18, unit, text_anchor="end"))
    return f'{"".join(parts)}<g text-anchor="middle" font-size="11">{"".join(names)}</g>'


def _legend(split: bool, chunks: int, moving: bool, y: float, width: float) -> tuple[str, int]:
    """The meaning of each mark, wrapped to the width; and how many lines it takes."""
    marks = [("F", "F forward")]
    marks += [("B", "B gradient of the input"), ("W", "W gradient of the weights")] if split else [("B", "B backward")]
    marks += [("communication", "communication (waits)"), ("transfer", "transfers")] if moving else []
    marks += [("idle", "idle")] + ([("", "lighter: later chunks")] if chunks > 1 else [])
    parts, x, lines = [], 10.0, 1
    for name, told in marks:
        need = (34 if name else 6) + text_width(told, 11)
        if x > 10 and x + need > width:
            x, y, lines = 10.0, y + 18, lines + 1
        if name and name in KINDS:
            mark = _path(name, 0, "M0 0h240", 13)
        elif name == "idle":
            mark = f'<path d="M0 0h240" stroke="{COLOURS["idle"]}" stroke-width="15" stroke-dasharray="15 30"/>'
        elif name == "communication":
            mark = f'<path d="M0 0h240" stroke="{COLOURS[name]}" stroke-width="65" stroke-dasharray="35 15"/>'
        else:
            mark = f'<path d="M0 -35h240M0 35h240" stroke="{COLOURS["transfer"]}" stroke-width="30"/>' if name else ""
        parts.append(f'<g transform="translate({x:g} {y - 4:g}) scale(.1)" fill="none">{mark}</g>' if mark else "")
        parts.append(write(x + (29 if name else 0), y, told))
        x += need + 10
    return f'<g font-size="11" class="legend">{"".join(parts)}</g>', lines
