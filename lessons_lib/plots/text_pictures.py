"""The pictures as fixed-width text: for terminals, screen readers, printed notebooks and exact comparison in tests."""

from __future__ import annotations

import numpy as np

from ..hardware import rate, whole
from .curve_picture import curves, nearest_link
from .timeline_picture import choose_ranks
from .wording import KINDS, format_time, percent, sentence, three_digits, time_unit, totals

MARKS = "#=."  # compute, communication, idle


def timeline_text(timeline, width: int = 80, ranks=None) -> str:
    """One line a rank, `width` characters wide in all: # compute, = communication, . idle.

    A character stands for an equal part of the step and shows what filled most of it; what the characters so far left out counts
    with the next, so that a row has as many of each as the rank spent time on it.
    """
    width = whole(width, "The width in characters", 40, 1000)
    rows, hidden = choose_ranks(timeline, ranks)
    margin = len(f"rank {max(rows)}")
    inner = width - margin - 3
    step = timeline.step_time
    lines = [sentence(timeline)] + ([timeline.title] if timeline.title else [])
    lines += [f"first {len(rows)} of {timeline.world_size} ranks"] if hidden else []
    for rank in rows:
        bar = _letters(filled(timeline, rank, inner)) if step > 0 else " " * inner
        lines.append(f"{f'rank {rank}'.rjust(margin)} |{bar}|")
    end = format_time(step)
    lines.append(" " * (margin + 2) + "0" + end.rjust(inner - 1))
    lines.append(" " * (margin + 2) + "# compute  = communication  . idle")
    return "\n".join(lines)


def _letters(shares: np.ndarray) -> str:
    due, out = np.zeros(3), []
    for share in shares:
        due += share
        kind = int(np.round(due, 6).argmax())  # rounded: a tie must not hang on the last digit
        due[kind] -= 1
        out.append(MARKS[kind])
    return "".join(out)


def filled(timeline, rank: int, parts: int) -> np.ndarray:
    """parts x 3: which share of each of `parts` equal pieces of the step this rank spent on compute, communication, idle."""
    columns = timeline.columns
    mine = np.flatnonzero(columns["rank"] == rank)
    mine = mine[np.argsort(columns["start"][mine], kind="stable")]
    edges = np.linspace(0, timeline.step_time, parts + 1)
    out = np.zeros((parts, 3))
    if timeline.step_time <= 0 or not len(mine):
        return out
    start, end, kind = (columns[name][mine] for name in ("start", "end", "kind"))
    for k in range(3):
        some = kind == k
        if some.any():
            times = np.stack([start[some], end[some]], axis=1).ravel()
            done = np.concatenate([[0.0], np.cumsum(end[some] - start[some])])
            sums = np.stack([done[:-1], done[1:]], axis=1).ravel()  # seconds of this kind so far, at each of `times`
            out[:, k] = np.diff(np.interp(edges, times, sums))
    return out * parts / timeline.step_time


def breakdown_text(timeline) -> str:
    """A line a rank: seconds of compute, communication and idle in the step's unit, which sum to the step; then the mean."""
    step = timeline.step_time
    unit, size = time_unit(step) if step > 0 else ("s", 1.0)
    rows = [(f"rank {i}", *row) for i, row in enumerate(totals(timeline).tolist())]
    rows.append(("mean", *totals(timeline).mean(axis=0).tolist()))
    cells = [("", *(f"{name} ({unit})" for name in KINDS), f"step ({unit})")]
    cells += [(name, *(f"{v / size:.3f}" for v in values), f"{step / size:.3f}") for name, *values in rows]
    if step > 0:
        cells.append(("share", *(percent(v / step) for v in rows[-1][1:]), "100%"))
    return f"{timeline.kind.capitalize()}: where each rank's step goes\n" + _aligned(cells)


def curve_text(bandwidths, step_times, kind: str = "replayed", most: int = 16) -> str:
    """Step time (seconds) at up to `most` of these bandwidths (bytes/s), as times the shortest, and which link is that fast."""
    most = whole(most, "The number of rows", 2, 10_000)
    bandwidths, named = curves(bandwidths, step_times)
    order = np.argsort(bandwidths)
    chosen = order[np.unique(np.rint(np.linspace(0, len(order) - 1, min(most, len(order)))).astype(int))]
    out = [f"{kind.capitalize()} step time against bandwidth (per direction)"]
    for name, times in named.items():
        least = times[times > 0].min() if (times > 0).any() else 1.0
        cells = [("bandwidth", "step time", "x shortest", "link")]
        for i in chosen:
            link = nearest_link(bandwidths[i])
            cells.append((rate(bandwidths[i]), format_time(times[i]), three_digits(times[i] / least), link.name if link else ""))
        out += ([f"{name}:"] if name else []) + [_aligned(cells, left=(3,))]
    return "\n".join(out)


def _aligned(cells: list[tuple], left: tuple[int, ...] = (0,)) -> str:
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    lines = ["  ".join(c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths))) for row in cells]
    return "\n".join(text.rstrip() for text in lines)
