"""What an answer about the time of a message must show (lesson 01): transfer_time, fit."""

from __future__ import annotations

import secrets

import numpy as np

from ..hardware import PCIE4, Link
from .exercise import Wrong
from .trial import Trial, shown
from .values import expect_close, number

# ---- transfer_time ----------------------------------------------------------------------------------------------------

_TIME_MISTAKES = (  # what gives exactly that number, and the belief behind it
    (lambda n, g, us: us * 1e-6 + n / (g * 1e9), "That takes gigabits for gigabytes: a byte has 8 bits."),
    (lambda n, g, us: us * 1e-6 + n * 8 / (g * 2**30), "That takes a gigabit for 2**30 bits: links are quoted in powers of ten."),
    (lambda n, g, us: n * 8 / (g * 1e9), "That is the bandwidth's part alone: every message pays the latency, too."),
    (lambda n, g, us: us + n * 8 / (g * 1e9), "That adds microseconds to seconds: convert the latency first."),
    (lambda n, g, us: us * 1e-3 + n * 8 / (g * 1e9), "That takes microseconds for milliseconds: 1 us is 1e-6 s."),
    (lambda n, g, us: us * 1e-6 + n * 8 / g, "That divides bits by gigabits per second: 1 Gbit/s is 1e9 bits per second."),
    (lambda n, g, us: us + n * 8 / (g * 1e3), "That is in microseconds: return seconds."),
    (lambda n, g, us: us * 1e-3 + n * 8 / (g * 1e6), "That is in milliseconds: return seconds."),
    (
        lambda n, g, us: us * 1e-6 + 2 * n * 8 / (g * 1e9),
        "That halves the bandwidth: it is quoted per direction, each has all of it.",
    ),
    (lambda n, g, us: us * 1e-6 + n / 8 / (g * 1e9), "That divides by 8 where it should multiply: there are more bits than bytes."),
)


def _time(nbytes, gigabits, microseconds):
    return microseconds * 1e-6 + nbytes * 8 / (gigabits * 1e9)


def judge_transfer_time(trial: Trial) -> str:
    rng = np.random.default_rng()
    inputs = [(int(rng.integers(1, 10**e)), int(rng.integers(1, 800)), round(float(rng.uniform(1, 90)), 1)) for e in (3, 5, 7, 9)]
    inputs += [(10**9, 100, 14.0)]
    values = trial.values(inputs)
    numbers = [_plain(value, "a number of seconds") for value in values]
    errors = [abs(got / _time(*given) - 1) if np.isfinite(got) else np.inf for given, got in zip(inputs, numbers)]
    if max(errors) > 1e-6:
        mistakes = [
            text for wrong, text in _TIME_MISTAKES if all(expect_close(g, wrong(*i), 1e-6) for i, g in zip(inputs, numbers))
        ]
        if not mistakes and len(set(numbers)) == 1:
            mistakes = ["Your function returns the same number whatever it is given."]
        given, got = inputs[int(np.argmax(errors))], numbers[int(np.argmax(errors))]
        call = "transfer_time({:,}, {}, {})".format(*given)
        raise Wrong("\n".join([f"{call} should be {_time(*given):.4g} seconds; yours returns {got:.4g}.", *mistakes[:1]]))
    return (
        f"1 GB over 100 Gbit Ethernet takes {1e3 * numbers[-1]:.1f} ms (predicted): 100 Gbit/s are 12.5 GB/s, and beside "
        "that the latency of 14 us is nothing."
    )


def _plain(value, what: str) -> float:
    got = number(value)
    if got is None:
        missing = " Is the `return` missing?" if value is None else ""
        raise Wrong(f"Your function returned {shown(value)}, and should return {what}.{missing}")
    return got


# ---- fit --------------------------------------------------------------------------------------------------------------

_FIT_TOLERANCE = 0.1


def _measurements(link: Link, sizes, seed: int):
    """Times of messages over a link, each off by at most 2%: (sizes, seconds)."""
    noise = np.random.default_rng(seed).uniform(0.98, 1.02, len(sizes))
    return [int(n) for n in sizes], [float((link.latency + n / link.bandwidth) * e) for n, e in zip(sizes, noise)]


def judge_fit(trial: Trial) -> str:
    rng = np.random.default_rng()
    links = [Link(rng.uniform(1e9, 90e9), rng.uniform(2e-6, 40e-6)) for _ in range(3)]
    wide = np.logspace(0, 8, 25)
    inputs = [_measurements(link, wide, secrets.randbits(60)) for link in links[:2]]
    # Here the largest message still spends a quarter of its time on latency.
    inputs.append(
        _measurements(links[2], np.logspace(0, np.log10(3 * links[2].latency * links[2].bandwidth), 40), secrets.randbits(60))
    )
    links.append(PCIE4)
    inputs.append(_measurements(PCIE4, wide, 1))
    values = trial.values(inputs)
    for link, given, value in zip(links, inputs, values):
        latency, bandwidth = _pair(value)
        good = [expect_close(latency, link.latency, _FIT_TOLERANCE), expect_close(bandwidth, link.bandwidth, _FIT_TOLERANCE)]
        if not all(good):
            raise Wrong(
                f"{len(given[0])} messages of 1 to {max(given[0]):,} bytes over a link of {1e6 * link.latency:.2f} us and "
                f"{link.bandwidth / 1e9:.2f} GB/s, each measured to within 2%. Your fit: latency {latency:.4g} s, bandwidth "
                f"{bandwidth:.4g} bytes/s; within 10% of the link would pass.\n"
                + _explain_fit(link, given, latency, bandwidth, good)
            )
    latency, bandwidth = _pair(values[-1])
    return (
        f"From 25 measurements over PCIe 4 ({1e6 * PCIE4.latency:g} us, {PCIE4.bandwidth / 1e9:g} GB/s) you found "
        f"{1e6 * latency:.2f} us and {bandwidth / 1e9:.1f} GB/s: both within 10%."
    )


def _pair(value) -> tuple[float, float]:
    try:
        latency, bandwidth = value
    except Exception:
        missing = " Is the `return` missing?" if value is None else ""
        raise Wrong(f"Your function returned {shown(value)}, and should return two numbers: latency, bandwidth.{missing}") from None
    return _plain(latency, "a latency in seconds first"), _plain(bandwidth, "a bandwidth in bytes per second second")


def _explain_fit(link: Link, given, latency: float, bandwidth: float, good: list[bool]) -> str:
    sizes, seconds = np.array(given[0], float), np.array(given[1])
    close = lambda got, true: expect_close(got, true, _FIT_TOLERANCE)  # noqa: E731
    if close(latency, link.bandwidth) and close(bandwidth, link.latency):
        return "The two are swapped: latency comes first."
    if close(bandwidth, 1 / link.bandwidth):
        return "That bandwidth is seconds per byte, the slope of the line: a bandwidth is bytes per second."
    if close(bandwidth * 1e9, link.bandwidth) or close(bandwidth * 1e6, link.bandwidth):
        return "Return the bandwidth in bytes per second, not in GB/s or MB/s."
    if close(latency, 1e6 * link.latency) or close(latency, 1e3 * link.latency):
        return "Return the latency in seconds: 1 us is 1e-6 s."
    slope, start = np.polyfit(sizes, seconds, 1)
    if expect_close(latency, start, 1e-3) and expect_close(bandwidth, 1 / slope, 1e-3):
        return (
            "That is the straight line with the least absolute errors. 2% of the largest time is more than the whole latency, so "
            "the largest messages decide alone: make the relative errors small."
        )
    if not good[1] and expect_close(bandwidth, sizes[-1] / seconds[-1], 1e-3):
        return "That is bytes / time of the largest message, whose time still contains the latency."
    if good[1]:
        return "The bandwidth fits; the latency does not. Which messages tell you the latency?"
    return "The latency fits; the bandwidth does not. Which messages tell you the bandwidth?" if good[0] else ""
