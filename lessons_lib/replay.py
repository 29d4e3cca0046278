"""Replay: price a recording on any cluster, in virtual time. Also hands on `sweep` and `measured`. Imports no torch."""

from __future__ import annotations

import math

import numpy as np

from .critical import critical_path, operation_details
from .errors import Deadlock, Wait, deadlock_message
from .formulas import check_algorithm
from .hardware import Cluster
from .matching import AWAIT, POST, Matching, check, match
from .recording import COLLECTIVE, COMPUTE, SEND, Recording
from .simulate import Costs, Schedule, durations, prepare, simulate
from .timeline import Span, Timeline, Transfer, build

__all__ = ["Span", "Timeline", "Transfer", "replay"]


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
    return _timeline(recording, cluster, matching, costs, schedule)


def fit(recording, cluster, algorithm) -> tuple[Matching, Costs]:
    """Check that recording, cluster and algorithm go together; match and price them."""
    check(recording)
    if not isinstance(cluster, Cluster):
        raise TypeError(f"The second argument must be a hardware.Cluster, such as Cluster(H100), not {cluster!r}.")
    check_algorithm(algorithm)
    if recording.world_size > cluster.world_size:
        raise ValueError(
            f"This recording has {recording.world_size} ranks, but the cluster only {cluster.world_size} devices "
            f"({cluster.nodes} nodes of {cluster.devices_per_node}). Take more nodes or more devices per node."
        )
    matching = match(recording)
    return matching, prepare(recording, matching, cluster)


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
    moving = (rank[m.operations[posts]], start[own], end[own])
    timeline = build(
        kind="replayed", title=_title(recording, cluster, m, costs), world_size=m.world_size, step_time=step_time,
        events=events, blocked=blocked, moving=moving,
        transfer_columns=transfer_columns(recording, m, start, end, costs.wires), labels=list(recording.labels),
        details=details, operations=["send", *recording.ops], groups=list(recording.groups),
        path=lambda: critical_path(recording, m, s, timeline),
    )  # fmt: skip
    return timeline


def transfer_columns(recording, m: Matching, start, end, wires) -> dict[str, np.ndarray]:
    """Columns of the transfers that took place."""
    moved = np.flatnonzero(start >= 0)
    return {
        "start": start[moved], "end": end[moved], "source": m.source[moved], "destination": m.destination[moved],
        "group": m.group[moved], "nbytes": m.nbytes[moved].astype("i8"), "operation": m.op[moved] + 1, "wire": wires[moved],
    }  # fmt: skip


def _title(recording, cluster: Cluster, m: Matching, costs: Costs) -> str:
    n = recording.world_size
    over = f"{cluster.intra_node.title}"
    if n > cluster.devices_per_node:
        over = f"{over} and, across nodes, {cluster.inter_node.title}" if cluster.devices_per_node > 1 else cluster.inter_node.title
    return f"{n} rank{'s' if n > 1 else ''} on {cluster.device.name or 'a device'} over {over}"


# ---- deadlock ------------------------------------------------------------------------------------------------------------


def explain_deadlock(recording: Recording, m: Matching, s: Schedule) -> None:
    """Raise Deadlock if a simulation ended with ranks that wait."""
    stuck = [rank for rank, finish in enumerate(s.finish) if finish < 0]
    if stuck:
        ended = {rank for rank, finish in enumerate(s.finish) if finish >= 0}
        raise Deadlock(deadlock_message([_wait(recording, m, s, rank) for rank in stuck], ended=ended))


def _wait(recording: Recording, m: Matching, s: Schedule, rank: int) -> Wait:
    a, b = m.first_operation[rank], m.first_operation[rank + 1]
    i = int(max(i for i in range(a, b) if s.at[i] >= 0))  # the operation that it is in: the last one reached
    event, origin, x = m.events[m.operations[i]], m.events[m.origin[i]], m.transfer[i]
    line = recording.lines[event["line"]] if event["line"] >= 0 else "line not known"
    late = "wait for " if m.mode[i] == AWAIT else ""
    if origin["kind"] == COLLECTIVE:
        op = recording.ops[origin["op"]]
        posted = np.flatnonzero((m.transfer == x) & (m.mode != AWAIT) & (np.array(s.at) >= 0))
        there = set(m.rank[m.operations[posted]].tolist())
        needs = tuple(r for r in recording.groups[origin["group"]] if r not in there)
        return Wait(rank, f"{late}{op}", line, needs, f"{op} by every member")
    peer, sends = int(origin["peer"]), bool(origin["kind"] == SEND)
    here, there = (
        (f"send to rank {peer}", f"a recv from rank {rank} by rank {peer}")
    if not sends:
        here, there = f"recv from rank {peer}", f"a send to rank {rank} by rank {peer}"
    )
    return Wait(rank, late + here, line, (peer,), there, sends)
