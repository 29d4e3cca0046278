"""A discrete-event simulation of one recording on one cluster: when does each transfer start and end, when does each rank go on.

A rank has, per link class (inside the node, across nodes), one port to send and one to receive. A transfer is ready when all its
posts are there and starts as soon as all its ports are free. Of several that could start at one moment the one goes first that
was ready first, then the one with the lower (sender, position of the post). Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from ..errors import Deadlock, Wait, deadlock_message
from ..recording import COLLECTIVE, SEND, Recording
from .matching import AWAIT, POST, Matching
from .pricing import Costs


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
                    if ports[x]:
                        heappush(events, (ready[x], ready[x], priority[x], x))
                    else:  # a group of one
                        start[x] = end[x] = ready[x]
                        order.append(x)
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
        if len(mine) == 2:
            busy = mine[0] if free[mine[0]] > free[mine[1]] else mine[1]
        else:
            busy = max(mine, key=free.__getitem__)
        slept = asleep.pop(x, -1)
        if free[busy] > now:
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
        return Wait(rank, f"{late}{op}", line, needs, f"{op} on every member")
    peer, sends = int(origin["peer"]), bool(origin["kind"] == SEND)
    here, there = f"send to rank {peer}", f"a recv from rank {rank} on rank {peer}"
    if not sends:
        here, there = f"recv from rank {peer}", f"a send to rank {rank} on rank {peer}"
    return Wait(rank, late + here, line, (peer,), there, sends)
