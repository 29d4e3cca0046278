"""Numbers and findings in words: the same units and the same sentence under every picture, in text and in widgets.

Times are seconds. Bandwidths are worded by hardware.rate, sizes by timeline.size_text.
"""

from __future__ import annotations

import numpy as np

from ..replay.timeline import KINDS

_TIME_UNITS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9))


def three_digits(value: float) -> str:
    """Three significant digits, never in exponent form: 12.3, 450, 1.00, 1,230."""
    if value and abs(value) < 0.000995:
        return f"{value:.2g}"
    text = f"{value:#.3g}" if abs(value) < 999.5 else f"{value:,.0f}"
    return text.rstrip(".")


def time_unit(seconds: float) -> tuple[str, float]:
    """The unit (name, seconds) in which this time has one to three digits before the point."""
    return next(((name, unit) for name, unit in _TIME_UNITS if seconds >= 0.9995 * unit), _TIME_UNITS[-1])


def format_time(seconds: float) -> str:
    """Seconds in the unit that suits them: "12.3 ms", "450 ns", "0 s"."""
    if seconds == 0:
        return "0 s"
    name, unit = time_unit(abs(seconds))
    return f"{three_digits(seconds / unit)} {name}"


def totals(timeline) -> np.ndarray:
    """ranks x 3 seconds of compute, exposed communication and idle; each row sums to the step time."""
    columns = timeline.columns
    cell = columns["rank"].astype(np.int64) * 3 + columns["kind"]
    sums = np.bincount(cell, columns["end"] - columns["start"], minlength=3 * timeline.world_size)
    return sums.reshape(timeline.world_size, 3)


def pace(timeline) -> str:
    """Which part sets the pace: what the chain of spans that held up the end (the critical path) consists of."""
    path = {kind: 0.0 for kind in KINDS}
    for span in timeline.critical_path():
        path[span.kind] += span.end - span.start
    length = sum(path.values())
    if not length:
        return "nothing takes time"
    link, device = path["communication"] / length, path["compute"] / length
    if link == 0 and device > 0.5:
        return "the device alone sets the pace"
    if link >= 1.5 * device:
        return "the link, not the device, sets the pace"
    if device >= 1.5 * link:
        return "the device, not the link, sets the pace"
    return "device and link share the pace"


def sentence(timeline) -> str:
    """The finding in words: kind of number, step time, where the time goes (mean over ranks), and what sets the pace."""
    kind, step = timeline.kind.capitalize(), timeline.step_time
    if step == 0:
        return f"{kind}: step 0 s; nothing in this recording takes time."
    compute, communication, idle = (percent(v) for v in totals(timeline).mean(axis=0) / step)
    waiting = f", waiting for other ranks {idle}" if idle != "0%" else ""
    return f"{kind}: step {format_time(step)}; communication is {communication} of the step{waiting}; {pace(timeline)}."


def percent(share: float) -> str:
    """A share in whole per cent; "under 1%" says that it is small and not nothing."""
    share = round(float(share), 9)  # the last digits differ between machines
    return "under 1%" if 0 < share <= 0.005 else f"{100 * share:.0f}%"
