"""The timeline as SVG: a row a rank; compute, communication and idle told apart by colour, height and texture.

Spans of one kind on one rank are one <path> of thick horizontal strokes, so 4,000 bars take a few milliseconds and tens of
kilobytes. Runs of spans too narrow to see become cells two pixels wide, divided by height in proportion to what happened in
them: 200,000 spans give a picture of the same size.
"""

from __future__ import annotations

import functools

import numpy as np

from ..hardware import number, whole
from ..replay.timeline import size_text
from .svg import COLOURS, clean, clip, document, line, round_up, text_width, ticks, write
from .wording import KINDS, format_time, sentence, time_unit

LEFT, RIGHT, TOP = 62, 26, 32  # pixels around the rows
MOST_RANKS = 64
NARROW, CELL = 0.8, 2.0  # pixels: spans under NARROW are drawn together in cells of CELL
TITLED, LABELLED = 600, 28.0  # how many spans get a tooltip of their own; from how many pixels on they may carry text
LEGEND = (
    ("compute", "compute"),
    ("communication", "communication (the rank waits)"),
    ("idle", "idle"),
    ("transfer", "transfers, out above, in below"),
)
# rows: at most so many ranks -> pixels from row to row, bar height, height of one lane of transfers, font size
_ROWS = ((8, 36, 20, 3.0, 12), (16, 26, 13, 3.0, 11), (32, 17, 8, 2.0, 10), (MOST_RANKS, 12, 6, 1.5, 9))


def timeline_svg(timeline, width: int = 760, until: float | None = None, ranks=None) -> str:
    """The timeline as SVG text, `width` pixels wide; its height depends on the number of ranks alone.

    `until` (seconds) is where the time axis ends, for two pictures on one scale; without it, the next round number after the
    step. `ranks` chooses rows (an iterable of rank numbers); without it all are shown, or the first 64.
    """
    rows, hidden = choose_ranks(timeline, ranks)
    width = whole(width, "The picture's width in pixels", 300, 10_000)
    step = timeline.step_time
    if until is None:
        until = round_up(step) if step > 0 else 1e-9
    elif number(until, "until, the end of the time axis,", "a positive, finite number of seconds, or left out") < step * (1 - 1e-9):
        raise ValueError(
            f"until is {format_time(until)}, but this step takes {format_time(step)}: name a time that is not shorter."
        )
    pitch, bar, lane, font = next(row[1:] for row in _ROWS if len(rows) <= row[0])
    inner = width - LEFT - RIGHT
    bottom = TOP + pitch * len(rows)
    scale = inner / until
    bars, shared = _bars(timeline, rows, scale, pitch, bar)
    title = f"{timeline.kind.capitalize()}: step {format_time(step)}"
    told = [timeline.title] if timeline.title else []
    told += [f"first {len(rows)} of {timeline.world_size} ranks"] if hidden else []
    told += ["narrow bars are drawn stacked"] if shared else []
    heading = 10 + text_width(title, 12) * 1.1 + 10
    names = [write(LEFT - 8, TOP + i * pitch + bar / 2 + font * 0.36, f"rank {r}") for i, r in enumerate(rows)]
    parts = [
        write(10, 18, title, font_weight="bold"),
        write(round(heading), 18, clip(" \u00b7 ".join(told), 12, width - heading)),
        axis_parts(until, scale, bottom),
        f'<g text-anchor="end" font-size="{font}">{"".join(names)}</g>',
        *bars,
        *transfers_parts(timeline, rows, scale, pitch, bar, lane),
    ]
    if step > 0:
        x = LEFT + step * scale
        parts.append(line(x, TOP - 4, x, bottom, "#1a1a1a", stroke_dasharray="2 2"))
    legend, lines = _legend(bottom + 44, width)
    return document(width, bottom + 34 + 18 * lines, f"{sentence(timeline)} {timeline.title}", [*parts, legend])


def timeline_height(ranks: int, width: int = 760) -> int:
    """Pixels of the height of a timeline of so many ranks, `width` pixels wide."""
    rows = min(ranks, MOST_RANKS)
    return TOP + next(row[1] for row in _ROWS if rows <= row[0]) * rows + 34 + 18 * _legend(0, width)[1]


def choose_ranks(timeline, ranks, most: int = MOST_RANKS) -> tuple[list[int], bool]:
    """The ranks that get a row, and whether some were left out unasked."""
    world = timeline.world_size
    if ranks is None:
        return list(range(min(world, most))), world > most
    try:
        chosen = [int(r) if int(r) == r and not isinstance(r, bool) else -1 for r in ranks]
    except (TypeError, ValueError):
        chosen = [-1]
    if not 0 < len(chosen) <= most or len(set(chosen)) < len(chosen) or any(not 0 <= r < world for r in chosen):
        raise ValueError(
            f"ranks is {ranks!r}; allowed are 1 to {most} different whole numbers from 0 to {world - 1}: range(0, {world}, 8), say."
        )
    return chosen, False


def merged(start, end, kind, rank) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Spans in pixels, sorted by rank and start -> what is drawn: (start, end, rank, parts), parts = cells x 3 shares of a cell.

    A span wide enough is a cell of its own (one share is 1). Narrow neighbours share cells of at most CELL pixels.
    """
    if not len(start):
        return start, end, rank, np.zeros((0, 3))
    length = end - start
    narrow = length < NARROW
    slot = np.floor(start / CELL)
    new = np.ones(len(start), dtype=bool)
    new[1:] = ~narrow[1:] | ~narrow[:-1] | (rank[1:] != rank[:-1]) | (slot[1:] != slot[:-1])
    first = np.flatnonzero(new)
    last = np.append(first[1:], len(start)) - 1
    parts = np.stack([np.add.reduceat(np.where(kind == k, length, 0.0), first) for k in range(3)], axis=1)
    whole = parts.sum(axis=1)
    nothing = whole <= 0  # spans without any length: take no room
    parts = parts[~nothing] / whole[~nothing, None]
    return start[first][~nothing], end[last][~nothing], rank[first][~nothing], parts


def _bars(timeline, rows: list[int], scale: float, pitch: int, bar: int) -> tuple[list[str], bool]:
    """All rows, and whether any bars had to share a cell."""
    columns = timeline.columns
    row_of = np.full(timeline.world_size, -1)
    row_of[rows] = np.arange(len(rows))
    row = row_of[columns["rank"]]
    order = np.lexsort((columns["start"], row))
    order = order[row[order] >= 0]
    row = row[order]
    start, end, kind = columns["start"][order] * scale, columns["end"][order] * scale, columns["kind"][order]
    x0, x1, at, parts = merged(start, end, kind, row)
    tenth0, tenth1 = np.rint(x0 * 10).astype(int), np.rint(x1 * 10).astype(int)
    pure = parts.max(axis=1) > 0.999 if len(parts) else np.zeros(0, dtype=bool)
    what = parts.argmax(axis=1) if len(parts) else np.zeros(0, dtype=int)
    gap = (tenth1 - tenth0 > 40) & pure  # wide neighbours stay apart, so that two pieces of work do not look like one
    long = np.maximum(tenth1 - tenth0 - 6 * gap, 1)
    inside, titles = _words(timeline, order, row, start, end, kind, len(rows), bar)
    out = []
    for i in range(len(rows)):
        lo, hi = np.searchsorted(at, (i, i + 1))
        here = slice(lo, hi)
        drawn = []
        for k, name in enumerate(KINDS):
            chosen = pure[here] & (what[here] == k)
            if chosen.any():
                drawn.append(f'<path class="{name}" d="{strokes(tenth0[here][chosen], long[here][chosen])}" {_style(name, bar)}/>')
        mixed = ~pure[here]
        if mixed.any():
            drawn += _mixed(tenth0[here][mixed], long[here][mixed], parts[here][mixed], bar)
        if titles[i]:
            drawn.append(f'<g class="titles" stroke="#000" stroke-opacity="0" stroke-width="{10 * bar}">{"".join(titles[i])}</g>')
        out.append(f'<g transform="translate({LEFT} {TOP + i * pitch + bar / 2:g}) scale(.1)" fill="none">{"".join(drawn)}</g>')
    halo = 'stroke="#fff" stroke-width="6" paint-order="stroke" stroke-linejoin="round"'
    for texts, how in zip(inside, ('fill="#fff"', halo)):
        if texts:
            written = "".join(f'<text x="{x}" y="{TOP + i * pitch + bar / 2 + 4:g}">{told}</text>' for i, x, told in texts)
            out.append(f'<g class="labels" font-size="11" text-anchor="middle" pointer-events="none" {how}>{written}</g>')
    return out, bool(len(pure)) and not pure.all()


def strokes(x: np.ndarray, length: np.ndarray) -> str:
    return ("M%d 0h%d" * len(x)) % tuple(np.stack([x, length], axis=1).ravel().tolist())


def _style(name: str, bar: float) -> str:
    """Compute is tall and solid, communication lower and striped, idle a dotted line (tenths of a pixel)."""
    if name == "compute":
        return f'stroke="{COLOURS[name]}" stroke-width="{10 * bar}"'
    if name == "communication":
        return f'stroke="{COLOURS[name]}" stroke-width="{7 * bar}" stroke-dasharray="35 15"'
    return f'stroke="{COLOURS[name]}" stroke-width="15" stroke-dasharray="15 30"'


def _mixed(x: np.ndarray, length: np.ndarray, parts: np.ndarray, bar: float) -> list[str]:
    """Cells that hold several kinds: compute from the bottom, communication on top of it, the rest idle."""
    low = np.rint(parts[:, 0] * 10 * bar).astype(int)
    high = np.rint((parts[:, 0] + parts[:, 1]) * 10 * bar).astype(int)
    out = []
    for name, base, top in (("compute", np.zeros_like(low), low), ("communication", low, high)):
        some = top > base
        if some.any():
            numbers = np.stack([x, 5 * bar - base, length, base - top, -length], axis=1)[some].astype(int)
            d = ("M%d %dh%dv%dh%dz" * len(numbers)) % tuple(numbers.ravel().tolist())
            out.append(f'<path d="{d}" class="{name} mixed" fill="{COLOURS[name]}"/>')
    return out


def _words(timeline, order, row, start, end, kind, rows: int, bar: int) -> tuple[tuple, list[list[str]]]:
    """Texts that fit into spans as (row, x, text), on compute and on communication; and per row the tooltips of the widest."""
    long = end - start
    wide = np.flatnonzero(long >= 3.0)
    if len(wide) > TITLED:
        wide = np.sort(wide[np.argsort(-long[wide], kind="stable")[:TITLED]])
    labels, details, columns = timeline.labels, timeline.details, timeline.columns
    label, detail = columns["label"][order[wide]].tolist(), columns["detail"][order[wide]].tolist()
    begin, took = columns["start"][order[wide]].tolist(), (columns["end"] - columns["start"])[order[wide]].tolist()
    x, length = np.rint(start[wide] * 10).astype(int).tolist(), np.rint(long[wide] * 10).astype(int).tolist()
    at, what = row[wide].tolist(), kind[wide].tolist()
    titles, inside, known = [[] for _ in range(rows)], ([], []), {}
    for i in range(len(wide)):
        key = (label[i], detail[i], what[i])
        if key not in known:
            own, done = labels[key[0]] if key[0] >= 0 else "", details[key[1]] if key[1] >= 0 else ""
            known[key] = clean("; ".join(t for t in (own, done, KINDS[key[2]]) if t)), own or done.split(" ")[0]
        told, short = known[key]
        titles[at[i]].append(
            f'<path d="M{x[i]} 0h{length[i]}"><title>{told}\n'
            f"from {format_time(begin[i])}, takes {format_time(took[i])}</title></path>"
        )
        if length[i] >= 10 * LABELLED and bar >= 13 and what[i] < 2:
            short = clip(short, 11, length[i] / 10 - 6)
            if short:
                inside[what[i]].append((at[i], f"{LEFT + (x[i] + length[i] / 2) / 10:.1f}", clean(short)))
    return inside, titles


def transfers_parts(timeline, rows: list[int], scale: float, pitch: int, bar: int, lane: float, titled: int = TITLED) -> list[str]:
    """Every transfer as a thin bar under the rows of its ranks: upper lane out, lower lane in, both lanes for a collective."""
    columns = timeline.transfer_columns
    start, end = columns["start"] * scale, columns["end"] * scale
    source, destination, group = columns["source"], columns["destination"], columns["group"]
    message = destination >= 0
    member = np.zeros((len(timeline.groups) + 1, timeline.world_size), dtype=bool)
    for i, ranks in enumerate(timeline.groups):
        member[i, list(ranks)] = True
    told = functools.cache(functools.partial(_told, timeline))  # a collective lies under the rows of all its members
    out = []
    for i, rank in enumerate(rows):
        y = TOP + i * pitch + bar + 2
        for mine, top, tall in (
            (message & (source == rank), y, lane),
            (message & (destination == rank), y + lane + 1, lane),
            (~message & member[group, rank], y, 2 * lane + 1),
        ):
            which = np.flatnonzero(mine)
            if not len(which):
                continue
            wide = which[end[which] - start[which] >= 6.0][: titled // len(rows)].tolist()
            titles = "".join(
                f'<path d="M{round(10 * start[j])} 0h{round(10 * (end[j] - start[j]))}"><title>{told(j)}</title></path>'
                for j in wide
            )
            out.append(
                f'<g transform="translate({LEFT} {top + tall / 2:g}) scale(.1)" stroke-width="{10 * tall:g}">'
                f'<path d="{strokes(*_lane(start[which], end[which]))}"/>'
                + (f'<g class="titles" stroke="#000" stroke-opacity="0">{titles}</g></g>' if titles else "</g>")
            )
    return [f'<g stroke="{COLOURS["transfer"]}" fill="none" class="transfers">{"".join(out)}</g>'] if out else []


def _lane(start: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bars (start, length in tenths of a pixel) of one lane; narrow ones that touch, nearly touch or overlap become one."""
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    narrow = end - start < 3.0
    reach = np.maximum.accumulate(np.where(narrow, end, -np.inf))
    new = np.ones(len(start), dtype=bool)
    new[1:] = ~narrow[1:] | ~narrow[:-1] | (start[1:] > reach[:-1] + NARROW)
    first = np.flatnonzero(new)
    x0 = np.rint(start[first] * 10).astype(int)
    x1 = np.rint(np.maximum.reduceat(end, first) * 10).astype(int)
    return x0, np.maximum(x1 - x0 - 6 * (x1 - x0 > 30), 2)


def _told(timeline, index: int) -> str:
    """The tooltip of a transfer."""
    t = {name: column[index] for name, column in timeline.transfer_columns.items()}
    members = len(timeline.groups[t["group"]])
    who = f"rank {t['source']} to rank {t['destination']}" if t["destination"] >= 0 else f"{members} ranks"
    told = f"{timeline.operations[t['operation']]} {size_text(t['nbytes'])}, {who}"
    return clean(told) + f"\nfrom {format_time(t['start'])}, takes {format_time(t['end'] - t['start'])}"


def axis_parts(until: float, scale: float, bottom: float) -> str:
    name, unit = time_unit(until)
    parts, names = [line(LEFT, bottom + 2, LEFT + until * scale, bottom + 2, "#1a1a1a")], []
    for i, t in enumerate(ticks(until)):
        x = round(LEFT + t * scale, 1)
        parts.append(line(x, TOP - 2, x, bottom + 6, "#dddddd" if i else "#1a1a1a"))
        names.append(write(x, bottom + 20, f"{round(t / unit, 6):g} {name}" if i else "0"))
    return f'{"".join(parts)}<g text-anchor="middle" font-size="11">{"".join(names)}</g>'


def _legend(y: float, width: float) -> tuple[str, int]:
    """The meaning of each mark, wrapped to the width; and how many lines it takes."""
    parts, x, lines = [], 10.0, 1
    for name, told in LEGEND:
        need = 34 + text_width(told, 11)
        if x > 10 and x + need > width:
            x, y, lines = 10.0, y + 18, lines + 1
        if name == "transfer":
            mark = f'<path d="M0 -35h240M0 35h240" stroke="{COLOURS[name]}" stroke-width="30"/>'
        else:
            mark = f'<path d="M0 0h240" {_style(name, 13)}/>'
        parts.append(f'<g transform="translate({x:g} {y - 4:g}) scale(.1)" fill="none">{mark}</g>')
        parts.append(write(x + 29, y, told))
        x += need + 10
    return f'<g font-size="11" class="legend">{"".join(parts)}</g>', lines
