"""Beside a pipeline's timeline, as SVG: what each rank holds at its peak, and the well-known schedules side by side."""

from __future__ import annotations

from .svg import COLOURS, box, document, line, round_up, text_width, write
from .wording import format_time

STATE, KEPT = COLOURS["compute"], "#CC79A7"  # the second is striped as well


def memory_svg(state, activations, capacity: float, width: int = 440, height: int = 280) -> str:
    """A bar a rank: `state` bytes (weights, gradients, optimizer) solid, `activations` at their peak striped; the device's memory.

    state, activations: a list with one number of bytes for each rank. capacity: bytes of a device, a line.
    """
    ranks = len(state)
    whole = [a + b for a, b in zip(state, activations)]
    most = round_up(max(*whole, capacity, 1.0))
    left, top, right = 58, 40, width - 74
    pitch = min(26.0, (height - top - 62) / ranks)
    bar = round(max(0.72 * pitch, 2.0), 1)
    scale, bottom = (right - left) / most, round(top + ranks * pitch + 2, 1)
    parts = [write(10, 18, "Predicted: peak memory of each rank", font_weight="bold")]
    for share in (0.0, 0.5, 1.0):
        x = left + share * most * scale
        parts += [
            line(x, top - 2, x, bottom, "#dddddd"),
            write(x, bottom + 14, _gb(share * most), text_anchor="middle", font_size=11),
        ]
    every = -(-12 // max(int(pitch), 1)) if pitch < 12 else 1  # names only as close as they can be read
    for rank in range(ranks):
        y = round(top + rank * pitch, 1)
        middle = round(y + bar / 2, 1)
        solid, total = round(state[rank] * scale, 1), round(whole[rank] * scale, 1)
        parts.append(box(left, y, solid, bar, STATE))
        if total > solid:
            stripes = {"stroke_width": round(0.7 * bar, 1), "stroke_dasharray": "3.5 1.5"}
            parts.append(line(left + solid, middle, left + total, middle, KEPT, **stripes))
        if rank % every == 0:
            over = {"font_weight": "bold"} if whole[rank] > capacity else {}
            parts.append(write(left - 8, middle + 4, f"rank {rank}", text_anchor="end", font_size=11))
            parts.append(write(right + 6, middle + 4, _gb(whole[rank]), font_size=11, **over))
    x = round(left + capacity * scale, 1)
    label = f"device {_gb(capacity)}"
    at = min(max(x, left + text_width(label, 11) / 2), width - 6 - text_width(label, 11) / 2)
    parts += [
        line(x, top - 6, x, bottom, "#1a1a1a", stroke_width=2, stroke_dasharray="5 3"),
        write(round(at, 1), top - 9, label, text_anchor="middle", font_size=11),
    ]
    y = height - 24
    parts += [
        box(10, y - 8, 14, 9, STATE), write(28, y, "weights, gradients, optimizer", font_size=11),
        line(10, y + 14, 24, y + 14, KEPT, stroke_width=7, stroke_dasharray="3.5 1.5"),
        write(28, y + 18, "activations in flight", font_size=11),
    ]  # fmt: skip
    told = ", ".join(f"rank {rank} {_gb(nbytes)}" for rank, nbytes in enumerate(whole[:16]))
    return document(width, height, f"Predicted peak memory: {told}; a device has {_gb(capacity)}.", parts)


def _gb(nbytes: float) -> str:
    """Bytes in the unit that suits a device's memory."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= 0.9995 * size:
            return f"{nbytes / size:.3g} {unit}" if nbytes < 999.5 * size else f"{nbytes / size:,.0f} {unit}"
    return f"{nbytes:.0f} B"


def bubbles_svg(schedules: dict, shown: str, width: int = 310, height: int = 280) -> str:
    """A row a schedule, without the link: the ideal step solid, the bubble dotted, both definitions, and the peak in flight.

    schedules: name -> (step in seconds, ideal in seconds, peak in flight in words, ...), or name -> why there is none.
    """
    dotted = {"stroke_width": 4, "stroke_dasharray": "1.5 3"}
    parts = [write(10, 18, "Predicted: the schedules without a link", font_weight="bold")]
    left, right, top, pitch = 24, width - 14, 44, 50
    longest = max((row[0] for row in schedules.values() if not isinstance(row, str)), default=0) or 1.0
    told = []
    for i, (name, row) in enumerate(schedules.items()):
        y = top + i * pitch
        bold = {"font_weight": "bold"} if name == shown else {}
        if name == shown:
            parts.append(f'<path class="shown" d="M8 {y - 9}l8 5l-8 5z" fill="#1a1a1a"/>')
        if isinstance(row, str):
            parts += [write(left, y, name, font_size=11, **bold), write(left, y + 15, row, font_size=11, fill="#555")]
            continue
        step, ideal, peak = row[:3]
        solid, whole = (round(seconds / longest * (right - left), 1) for seconds in (ideal, step))
        parts.append(write(left, y, f"{name}: {format_time(step)}, {peak}", font_size=11, **bold))
        parts.append(box(left, y + 5, solid, 11, STATE))
        if whole > solid:
            parts.append(
                line(left + solid, y + 10.5, left + whole, y + 10.5, COLOURS["idle"], stroke_width=4, stroke_dasharray="1.5 3")
            )
        numbers = f"{step / ideal - 1:.1%} over ideal, {1 - ideal / step:.1%} of the step idle"
        parts.append(write(left, y + 28, numbers, font_size=11))
        told.append(f"{name} {format_time(step)}")
    y = height - 10
    parts += [
        box(10, y - 8, 14, 9, STATE), write(28, y, "ideal", font_size=11),
        line(80, y - 4, 104, y - 4, COLOURS["idle"], **dotted), write(109, y, "bubble", font_size=11),
    ]  # fmt: skip
    return document(width, height, f"Predicted steps without a link: {', '.join(told)}.", parts)
