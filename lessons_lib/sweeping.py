"""Step times over many settings of a link: exactly what replay gives at each, in about the time of one. Imports no torch."""

from __future__ import annotations

import numpy as np

from .hardware import Cluster, number
from .matching import Matching
from .pricing import Costs, durations, fit
from .recording import Recording
from .simulate import explain_deadlock, simulate

LINKS = ("intra_node", "inter_node", "both")


def sweep(
    recording: Recording, cluster: Cluster, link: str = "intra_node", bandwidths=None, latency: float | None = None,
    algorithm: str = "ring",
) -> np.ndarray:  # fmt: skip
    """Step times (seconds) of a recording with each of `bandwidths` (bytes/s) on the cluster's link, in an array of the same shape.

    `link`: "intra_node", "inter_node", or "both" at once. `latency` (seconds) replaces that link's latency as well. Each value
    equals replay(...).step_time on a cluster with that link. Errors: as of replay; ValueError for bad bandwidths.
    """
    matching, costs = fit(recording, cluster, algorithm)
    lanes, shape = _lanes(bandwidths)
    if link not in LINKS:
        raise ValueError(f"There is no link {link!r} to sweep; choose 'intra_node', 'inter_node' or 'both'.")
    if latency is not None:
        latency = number(
            latency, "The latency", "a finite number of seconds, 0 or more, or None to keep the link's own", closed=True
        )
    return _sweep(recording, matching, costs, cluster, link, lanes, latency, algorithm).reshape(shape)


def _sweep(recording, m: Matching, costs: Costs, cluster, link, lanes, latency, algorithm) -> np.ndarray:
    out = []
    for lane in lanes.tolist():
        intra, inter = settings(cluster, link, lane, latency)
        schedule = simulate(m, costs, durations(recording, m, costs, intra, inter, algorithm))
        explain_deadlock(recording, m, schedule)
        out.append(max(max(schedule.finish), max(schedule.end, default=0.0)))
    return np.array(out)


def settings(cluster: Cluster, link: str, bandwidth, latency):
    """(bandwidth, latency) inside and across nodes, with the swept link's replaced."""
    pairs = []
    for name, own in (("intra_node", cluster.intra_node), ("inter_node", cluster.inter_node)):
        swept = link in (name, "both")
        pairs.append((bandwidth, own.latency if latency is None else latency) if swept else (own.bandwidth, own.latency))
    return pairs


def _lanes(bandwidths) -> tuple[np.ndarray, tuple[int, ...]]:
    allowed = "Give one positive, finite number of bytes per second or a one-dimensional array of them (450e9 is 450 GB/s)."
    if bandwidths is None:
        raise TypeError(f"sweep needs bandwidths=... {allowed}")
    array = np.asarray(bandwidths)
    if array.dtype.kind not in "iuf":
        raise TypeError(f"The bandwidths must be numbers, not {bandwidths!r:.60}. {allowed}")
    if array.ndim > 1 or not array.size:
        raise ValueError(f"The bandwidths have shape {array.shape}. {allowed}")
    lanes = array.astype(float).reshape(-1)
    bad = ~np.isfinite(lanes) | (lanes <= 0)
    if bad.any():
        i = int(np.argmax(bad))
        raise ValueError(f"Bandwidth number {i} is {lanes[i]}. {allowed}")
    return lanes, array.shape
