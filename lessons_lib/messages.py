"""One message: how long it takes, and the two constants of the link that carried it. Imports no torch.

A message of n bytes takes latency + n / bandwidth. Source: Hockney, "The communication challenge for MPP", Parallel Computing 20,
1994, which also names the size at which both terms are equal.
"""

from __future__ import annotations

import numpy as np

from .formulas import numbers
from .hardware import Link


def message_time(nbytes, link: Link):
    """Predicted seconds for one message of `nbytes` (a number or an array, 0 or more) that has the link for itself."""
    _check_link(link)
    return (
        link.latency + numbers(nbytes, "The number of bytes", "a finite number of bytes, 0 or more", closed=True) / link.bandwidth
    )


def half_size(link: Link) -> float:
    """latency x bandwidth, in bytes: the message for which both terms are equal, so that half of the bandwidth is reached.

    Hockney's n_1/2. A smaller message is dominated by latency, a larger one by bandwidth.
    """
    _check_link(link)
    return link.latency * link.bandwidth


def fit_link(nbytes, seconds, name: str = "") -> Link:
    """The link whose message_time comes closest to measured `seconds` for messages of `nbytes`.

    Least squares of the relative error: times differ by powers of ten, and an error of 10% counts the same in each. Latency is
    0 where the best fit would be negative. ValueError if no link is like that: fewer than two sizes, or times that do not grow.
    """
    n = np.atleast_1d(numbers(nbytes, "The number of bytes", "a finite number of bytes, 0 or more", closed=True))
    t = np.atleast_1d(numbers(seconds, "A measured time", "a positive, finite number of seconds", closed=False))
    if n.ndim != 1 or n.shape != t.shape:
        raise ValueError(f"There are {n.size} sizes and {t.size} times: give one measured time for each size.")
    if len(np.unique(n)) < 2:
        raise ValueError(
            f"Two constants need messages of at least two sizes, not {np.unique(n).tolist()}: measure a small and a large one."
        )
    latency, per_byte = np.linalg.lstsq(np.stack([1 / t, n / t], axis=1), np.ones(len(n)), rcond=None)[0]
    if latency < 0:
        latency, per_byte = 0.0, (n / t).sum() / ((n / t) ** 2).sum()
    if per_byte <= 0:
        raise ValueError("The times do not grow with the size, so no bandwidth fits them: measure larger messages.")
    return Link(float(1 / per_byte), float(latency), name)


def _check_link(link) -> None:
    if not isinstance(link, Link):
        raise TypeError(f"The link must be a hardware.Link, such as hardware.NVLINK4 or Link(10e9, 5e-6), not {link!r}.")
