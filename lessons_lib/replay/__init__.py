"""Replay: price a recording on any cluster, in virtual time. Also hands on `sweep` and `measured`. Imports no torch."""

from __future__ import annotations

import math

import numpy as np

from ..hardware import Cluster
from ..recording import COMPUTE, Recording
from .critical import critical_path, operation_details
from .matching import AWAIT, POST, Matching
from .pricing import Costs, durations, fit
from .simulate import Schedule, explain_deadlock, simulate
from .sweeping import sweep
from .timeline import Span, Timeline, Transfer, build, transfer_columns
from .wallclock import measured

__all__ = ["Span", "Timeline", "Transfer", "measured", "replay", "sweep"]


def replay(recording: Recording, cluster: Cluster, algorithm: str = "ring") -> Timeline:
    """What this recording would do on that cluster, in virtual time: a replayed Timeline.

    Rank r is device r of the cluster. `algorithm` ("ring" or "tree") prices the collectives, see formulas.collective_time.
    Errors: TypeError or ValueError for arguments that do not fit; Mismatch where ranks disagree; Deadlock where nobody can go on.
    """
    matching, costs = fit(recording, cluster, algorithm)
    intra, inter = cluster.intra_node, cluster.inter_node
    seconds = durations(
        recording, matching, costs, (intra.bandwidth, intra.latency), (inter.bandwidth, inter.latency), algorithm
    )  # fmt: skip
    schedule = simulate(matching, costs, seconds)
    explain_deadlock(recording, matching, schedule)
    matching.__dict__["_order"] = schedule.order  # sweep tries it first
    return _timeline(recording, cluster, matching, costs, schedule)


def _timeline(recording, cluster: Cluster, m: Matching, costs: Costs, s: Schedule) -> Timeline:
    at, start, end = np.array(s.at), np.array(s.start), np.array(s.end)
    resume = np.where(m.mode == POST, at, np.array(s.resume))
    step_time = max(max(s.finish), float(end.max(initial=0.0)))
    if not math.isfinite(step_time):
        raise ValueError("The step time is too large for a number: take a faster link or device, or fewer bytes.")
    rank = m.rank
    waits = np.flatnonzero(m.mode != POST)
    detail, details = operation_details(recording, m)

    # A compute event begins at its rank's last return from waiting, plus the compute since then.
    where = m.operations[waits]
    compute = np.flatnonzero(m.events["kind"] == COMPUTE)
    last_wait = np.searchsorted(where, compute) - 1
    waited = (last_wait >= 0) & (np.append(where, 0)[last_wait] >= m.first[rank[compute]])
    base = np.where(waited, np.append(resume[waits], 0.0)[last_wait], 0.0)
    before = np.where(compute == m.first[rank[compute]], 0.0, np.append(costs.after, 0.0)[compute - 1])
    events = (rank[compute], base + before, base + costs.after[compute], m.events["label"][compute])

    finished = np.array(s.finish)
    blocked_rank = np.concatenate([rank[where], np.arange(m.world_size)])
    order = np.argsort(blocked_rank, kind="stable")
    blocked = (
        blocked_rank[order],
        np.concatenate([at[waits], finished])[order],
        np.concatenate([resume[waits], np.full(m.world_size, step_time)])[order],
        np.concatenate([m.events["label"][where], np.full(m.world_size, -1)])[order],
        np.concatenate([detail[waits], np.full(m.world_size, len(details) - 2)])[order],
    )
    posts = np.flatnonzero((m.mode != AWAIT) & (start[m.transfer] >= 0))
    own = m.transfer[posts]
    mover = rank[m.operations[posts]]
    until = np.minimum(end[own], finished[mover])  # a rank that has finished is idle, whatever still moves
    short = until > start[own]
    moving = (mover[short], start[own][short], until[short])
    timeline = build(
        kind="replayed", title=_title(recording, cluster, m, costs), world_size=m.world_size, step_time=step_time,
        events=events, blocked=blocked, moving=moving,
        transfer_columns=transfer_columns(m, start, end, costs.wires), labels=list(recording.labels),
        details=details, operations=["send", *recording.ops], groups=list(recording.groups),
        path=lambda: critical_path(recording, m, s, timeline),
    )  # fmt: skip
    return timeline


def _title(recording, cluster: Cluster, m: Matching, costs: Costs) -> str:
    n = recording.world_size
    over = f"{cluster.intra_node.title}"
    if n > cluster.devices_per_node:
        over = f"{over} and, across nodes, {cluster.inter_node.title}" if cluster.devices_per_node > 1 else cluster.inter_node.title
    return f"{n} rank{'s' if n > 1 else ''} on {cluster.device.name or 'a device'} over {over}"
