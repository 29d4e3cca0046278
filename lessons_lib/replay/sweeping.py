"""Step times over many settings of a link: exactly what replay gives at each, in about the time of one. Imports no torch."""

from __future__ import annotations

import numpy as np

from ..formulas import price
from ..hardware import Cluster, number
from ..recording import Recording
from .lanes import Plan, run
from .matching import Matching
from .pricing import Costs, durations, fit
from .simulate import explain_deadlock, simulate

LINKS = ("intra_node", "inter_node", "both")
MOST_LANES = 1024  # at a time; bounds the memory
FEW_LANES = 10  # a pass that serves fewer is not worth its time
MOST_SIZES = 2048  # different messages whose durations are kept at a time; bounds it, too


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
    """Simulate one lane, apply its order of service to all, and do so again with those lanes where the order is another one.

    The order found last, by a replay or a sweep, is tried first: where it is proved to hold, nothing need be simulated.
    """
    out, plan = np.empty(len(lanes)), None
    todo = [(np.arange(i, min(i + MOST_LANES, len(lanes))), True) for i in range(0, len(lanes), MOST_LANES)]
    while todo:
        some, known = todo.pop()
        order = m.__dict__.get("_order") if known else None
        simulated = order is None
        if simulated:
            one = some[len(some) // 2]
            intra, inter = settings(cluster, link, float(lanes[one]), latency)
            schedule = simulate(m, costs, durations(recording, m, costs, intra, inter, algorithm))
            explain_deadlock(recording, m, schedule)
            out[one] = max(max(schedule.finish), max(schedule.end, default=0.0))
            order = m.__dict__["_order"] = schedule.order
            some = some[some != one]
        if len(some):
            plan = plan or _plan(m, costs, cluster.devices_per_node)
            intra, inter = settings(cluster, link, lanes[some], latency)
            seconds = _seconds(recording, m, costs, intra, inter, algorithm, len(some))
            empty = (m.nbytes == 0).any() or "barrier" in recording.ops
            found, good = run(plan, order, seconds, len(some), instant=bool(empty and min(intra[1], inter[1]) == 0))
            out[some[good]] = found[good]
            rest = some[~good]
            if simulated and good.sum() < FEW_LANES:  # nearly every lane has an order of its own
                todo += [(rest[i : i + 1], False) for i in range(len(rest))]
            elif len(rest):
                todo.append((rest, False))
    if not np.isfinite(out).all():
        raise ValueError("Some step times are too large for a number: take higher bandwidths or fewer bytes.")
    return out


def _plan(m: Matching, costs: Costs, per_node: int) -> Plan:
    """The plan of the last sweep, if the compute and the ports are the same: a slider asks for many."""
    kept = m.__dict__.get("_plan")
    key = (per_node, costs.before, costs.tail)
    if kept is None or kept[0] != key:
        kept = m.__dict__["_plan"] = (key, Plan(m, costs))
    return kept[1]


def _seconds(recording, m: Matching, costs: Costs, intra, inter, algorithm, lanes: int):
    """Indexed by the number of a transfer: the array of its durations."""
    keys = [
        (int(m.op[x]), nbytes, costs.shapes[x], wire)
        for x, (nbytes, wire) in enumerate(zip(m.nbytes.tolist(), costs.wires.tolist()))
    ]

    def compute(op, nbytes, shape, wire):
        if shape is None:
            bandwidth, latency = inter if wire else intra
            seconds = latency + nbytes / bandwidth
        else:
            seconds = price(recording.ops[op], nbytes, shape, intra, inter, algorithm)
        return seconds if np.ndim(seconds) else np.full(lanes, float(seconds))

    distinct = set(keys)
    if len(distinct) > MOST_SIZES:
        return _Computed(lambda x: compute(*keys[x]))
    table = {key: compute(*key) for key in distinct}
    return [table[key] for key in keys]


class _Computed:
    """Like a list whose items are computed at every look: slower, and small."""

    def __init__(self, item):
        self.item = item

    def __getitem__(self, x):
        return self.item(x)


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
    try:
        array = np.asarray(bandwidths)
    except ValueError:  # rows of different lengths
        array = np.array(None)
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
