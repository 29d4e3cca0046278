"""A discrete-event simulation of one recording on one cluster: when does each transfer start and end, when does each rank go on.

A rank has, per link class (inside the node, across nodes), one port to send and one to receive. A transfer is ready when all its
posts are there and starts as soon as all its ports are free. Of several that could start at one moment the one goes first that
was ready first, then the one with the lower (sender, position of the post). Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from .formulas import group_shape, price
from .hardware import Cluster
from .matching import AWAIT, BLOCK, POST, Matching
from .recording import COMPUTE, Recording


@dataclass(eq=False)
class Costs:
    """What a cluster makes of a recording: seconds between operations, seconds and ports of each transfer."""

    after: np.ndarray  # per event: seconds of compute since the rank last came back from waiting
    before: list[float]  # per operation: the same, just before it
    tail: list[float]  # per rank: the same, at its end
    wires: np.ndarray  # per transfer: 0 inside a node, 1 across nodes; of a collective that uses both: 2
    ports: list[tuple[int, ...]]  # per transfer: numbers of ports; 4 x rank + 2 x class + (0 send, 1 receive)
    shapes: list  # per transfer: formulas.group_shape of a collective, None for a message


@dataclass(eq=False)
class Schedule:
    """Times of one simulation, in seconds. A transfer that never starts has start and end -1."""

    start: list[float]
    end: list[float]
    ready: list[float]
    at: list[float]  # per operation: when its rank reaches it
    resume: list[float]  # per operation that waits: when its rank goes on; -1 where the rank never does
    finish: list[float]  # per rank: when its program ends; -1 if it does not
    order: list[int]  # transfers as they started
    blocker: list[int]  # per transfer: the one whose end it waited for at a port, -1 if none


def compute_seconds(recording: Recording, matching: Matching, device) -> np.ndarray:
    """Per event: seconds of compute, the sum over its operators of count x (larger of the two times + overhead).

    The two: flops / (peak x efficiency), and bytes / memory bandwidth.
    """
    flops = np.array([o.flops for o in recording.operators], dtype=float)
    nbytes = np.array([o.nbytes for o in recording.operators], dtype=float)
    each = np.maximum(flops / (device.flops * device.efficiency), nbytes / device.memory_bandwidth) + device.launch_overhead
    seconds = each[matching.cost_operator] * matching.cost_count
    return np.bincount(matching.cost_event, seconds, minlength=len(matching.events))


def prepare(recording: Recording, matching: Matching, cluster: Cluster) -> Costs:
    """Price the compute and find the ports."""
    m = matching
    seconds = compute_seconds(recording, m, cluster.device)
    waits = np.zeros(len(m.events), dtype=bool)
    waits[m.operations] = m.mode != POST
    after, now, ends = [], 0.0, []
    begin = m.first.tolist()
    seconds, waits = seconds.tolist(), waits.tolist()
    for a, b in zip(begin, begin[1:]):
        now = 0.0
        for i in range(a, b):
            now = 0.0 if waits[i] else now + seconds[i]
            after.append(now)
        ends.append(now)
    after = np.array(after)
    is_first = np.zeros(len(m.events) + 1, dtype=bool)
    is_first[m.first] = True
    before = np.where(is_first[m.operations], 0.0, after[m.operations - 1] if len(after) else 0.0)

    per_node = cluster.devices_per_node
    wires = (m.source // per_node != m.destination // per_node).astype(int)
    out, into = (4 * m.source + 2 * wires).tolist(), (4 * m.destination + 2 * wires + 1).tolist()
    ports = list(zip(out, into))
    shapes: list = [None] * len(ports)
    groups: dict[int, tuple] = {}
    for x in np.flatnonzero(m.destination < 0).tolist():
        group = int(m.group[x])
        if group not in groups:
            members = recording.groups[group]
            shape = n, nodes, _, most = group_shape([r // per_node for r in members])
            classes = () if n == 1 else (0,) if nodes == 1 else (1,) if most == 1 else (0, 1)
            used = tuple(4 * r + 2 * c + d for r in members for c in classes for d in (0, 1))
            groups[group] = (shape, used, 2 if len(classes) == 2 else int(nodes > 1))
        shapes[x], ports[x], wires[x] = groups[group]
    return Costs(after, before.tolist(), ends, wires, ports, shapes)


def durations(recording: Recording, matching: Matching, costs: Costs, intra, inter, algorithm: str) -> list[float]:
    """Seconds of each transfer; `intra` and `inter` are (bandwidth, latency)."""
    m, messages = matching, costs.wires == 0
    out = np.where(messages, intra[1] + m.nbytes / intra[0], inter[1] + m.nbytes / inter[0]).tolist()
    seen: dict[tuple, float] = {}
    for x in np.flatnonzero(m.destination < 0).tolist():
        key = (int(m.op[x]), float(m.nbytes[x]), costs.shapes[x])
        if key not in seen:
            seen[key] = float(price(recording.ops[key[0]], key[1], key[2], intra, inter, algorithm))
        out[x] = seen[key]
    return out


def simulate(matching: Matching, costs: Costs, seconds: list[float]) -> Schedule:
    """Run all ranks in virtual time. `seconds` is the duration of each transfer. Ends when nobody can go on."""
    m, size = matching, len(seconds)
    transfer, mode, before = m.transfer.tolist(), m.mode.tolist(), costs.before
    cursor, last = m.first_operation[:-1].tolist(), m.first_operation[1:].tolist()
    missing, priority, ports = m.needs.tolist(), m.priority.tolist(), costs.ports
    start, end, ready, blocker = [-1.0] * size, [-1.0] * size, [0.0] * size, [-1] * size
    at, resume, finish = [-1.0] * len(transfer), [-1.0] * len(transfer), [-1.0] * m.world_size
    waiting: dict[int, list[tuple[int, int]]] = {}  # per transfer: (rank, operation) of those that wait for it
    free, user = [0.0] * (4 * m.world_size), [-1] * (4 * m.world_size)  # per port: when it is free, and who had it last
    asleep: dict[int, int] = {}  # transfer: the busy port that it waits for
    queues: dict[int, list] = {}  # port: heap of (ready, priority, transfer) that wait for it, some of them gone
    events: list[tuple[float, float, int, int]] = []  # heap: at this time, try to start (.., ready, priority, transfer)
    order: list[int] = []

    def go_on(rank: int, now: float) -> None:
        """Run a rank's program, from the time at which it last came back, until it has to wait for something unknown."""
        for i in range(cursor[rank], last[rank]):
            x, what = transfer[i], mode[i]
            at[i] = reached = now + before[i]
            if what != AWAIT:
                if reached > ready[x]:
                    ready[x] = reached
                missing[x] -= 1
                if not missing[x]:
                    heappush(events, (ready[x], ready[x], priority[x], x))
                if what == POST:
                    continue
            over = end[x]
            if over < 0:
                waiting.setdefault(x, []).append((rank, i))
                cursor[rank] = i + 1
                return
            resume[i] = now = over if over > reached else reached
        cursor[rank] = last[rank]
        finish[rank] = now + costs.tail[rank]

    def wake_next(port: int, now: float) -> None:
        """See to it that the first of those that wait for this port tries again as soon as it is free."""
        queue = queues.get(port, ())
        while queue and asleep.get(queue[0][2]) != port:
            heappop(queue)
        if queue:
            heappush(events, (max(free[port], now), *queue[0]))

    for rank in range(m.world_size):
        go_on(rank, 0.0)
    while events:
        now, since, rank_order, x = heappop(events)
        if end[x] >= 0:
            continue  # it has started meanwhile
        mine = ports[x]
        busy = max(mine, key=free.__getitem__) if mine else -1
        slept = asleep.pop(x, -1)
        if mine and free[busy] > now:
            asleep[x] = busy
            if slept != busy:
                heappush(queues.setdefault(busy, []), (since, rank_order, x))
            if queues[busy][0][2] == x:
                heappush(events, (free[busy], since, rank_order, x))
            if slept not in (-1, busy):
                wake_next(slept, now)
            continue
        if since < now:
            blocker[x] = user[busy]
        start[x] = now
        end[x] = over = now + seconds[x]
        order.append(x)
        for port in mine:
            free[port] = over
            user[port] = x
        if slept >= 0:
            wake_next(slept, now)
        for rank, i in waiting.pop(x, ()):
            resume[i] = came_back = over if over > at[i] else at[i]
            go_on(rank, came_back)
    return Schedule(start, end, ready, at, resume, finish, order, blocker)


__all__ = ["BLOCK", "COMPUTE", "Costs", "Schedule", "compute_seconds", "durations", "prepare", "simulate"]
