"""Random programs that cannot deadlock, and a slow second opinion on how long they take, for the tests of replay and sweep."""

from __future__ import annotations

import math
import random

from lessons_lib import formulas
from lessons_lib.recording import COLLECTIVE, COMPUTE, SEND, WAIT, RankLog, Recording


def random_program(rng: random.Random, ranks: int, steps: int, ties: bool = False) -> Recording:
    """Operations are drawn one after the other for all ranks at once, so the program that results can always proceed.

    `ties` draws from few values, so that many things happen at the same moment.
    """
    logs = [RankLog(r, ranks) for r in range(ranks)]
    open_handles: list[list[int]] = [[] for _ in range(ranks)]

    def keep(rank: int, index: int, blocking: bool) -> None:
        if not blocking:
            open_handles[rank].append(index)

    for _ in range(steps):
        draw = rng.random()
        if draw < 0.3:
            flops = rng.choice([1, 2, 3]) * 1e9 if ties else rng.random() * 5e9
            logs[rng.randrange(ranks)].compute(
                flops=flops, nbytes=rng.randrange(2) * 2e9, count=rng.randrange(3), label=rng.choice("ab")
            )
        elif draw < 0.75 and ranks > 1:
            a, b = rng.sample(range(ranks), 2)
            nbytes, tag = rng.choice([500, 1000, 2000]) if ties else rng.randrange(1, 5000), rng.randrange(2)
            blocking = rng.random() < 0.3, rng.random() < 0.3
            keep(a, logs[a].send(b, nbytes, blocking=blocking[0], tag=tag), blocking[0])
            keep(b, logs[b].recv(a, nbytes, blocking=blocking[1], tag=tag), blocking[1])
        elif draw < 0.93:
            rank = rng.randrange(ranks)
            if open_handles[rank]:
                logs[rank].wait(open_handles[rank].pop(rng.randrange(len(open_handles[rank]))))
        else:
            group = tuple(sorted(rng.sample(range(ranks), rng.randrange(1, ranks + 1))))
            op, nbytes, blocking = rng.choice(formulas.COLLECTIVES), rng.randrange(1, 4000), rng.random() < 0.5
            for rank in group:
                keep(rank, logs[rank].collective(op, nbytes, blocking=blocking, group=group), blocking)
    for rank in range(ranks):
        for index in open_handles[rank]:
            if rng.random() < 0.7:
                logs[rank].wait(index)
    return Recording.from_logs(logs)


class _Move:
    def __init__(self, priority, needs):
        self.priority, self.missing = priority, needs
        self.ready = self.start = self.end = None
        self.ports, self.seconds = set(), 0.0


def scan(recording: Recording, cluster, algorithm: str = "ring") -> tuple[float, list[tuple]]:
    """Step time and sorted (start, end, priority) of the transfers, found by looking at everything again at every moment.

    Shares with replay neither the matching nor the engine: at each moment it lets all ranks run as far as they can, then starts
    what can start, one at a time, and moves on to the next moment at which anything ends. Costs are summed operator by operator.
    """
    device, n = cluster.device, recording.world_size
    moves: dict[tuple, _Move] = {}
    seen: dict[tuple, int] = {}

    def operator_seconds(operator) -> float:
        by_flops, by_bytes = operator.flops / (device.flops * device.efficiency), operator.nbytes / device.memory_bandwidth
        return max(by_flops, by_bytes) + device.launch_overhead

    def wire(a, b):
        same = a // cluster.devices_per_node == b // cluster.devices_per_node
        return ("in", cluster.intra_node) if same else ("out", cluster.inter_node)

    def turn(*key) -> int:
        seen[key] = seen.get(key, -1) + 1
        return seen[key]

    def post(rank, index, event) -> _Move:
        kind, nbytes = event["kind"], int(event["nbytes"])
        if kind == COLLECTIVE:
            members, op = recording.groups[event["group"]], recording.ops[event["op"]]
            key = (members, turn(rank, members))
            move = moves.setdefault(key, _Move((rank, index), len(members)))
            move.priority = min(move.priority, (rank, index))
            nodes = {r // cluster.devices_per_node for r in members}
            wires = set() if len(members) == 1 else {"in"} if len(nodes) == 1 else {"out"}
            if 1 < len(nodes) < len(members):
                wires = {"in", "out"}
            move.ports = {(r, w, d) for r in members for w in wires for d in ("send", "receive")}
            move.seconds = formulas.collective_time(op, nbytes, members, cluster, algorithm)
        else:
            a, b = (rank, int(event["peer"])) if kind == SEND else (int(event["peer"]), rank)
            channel = (a, b, int(event["group"]), int(event["tag"]))
            move = moves.setdefault((*channel, turn(kind, *channel)), _Move(None, 2))
            if kind == SEND:
                move.priority = (rank, index)
            name, link = wire(a, b)
            move.ports = {(a, name, "send"), (b, name, "receive")}
            move.seconds = link.latency + nbytes / link.bandwidth
        move.missing -= 1
        return move

    def program(rank):
        """Yields what the rank does: ("until", time) or ("move", move); is told the time at which it goes on."""
        now, mine = 0.0, {}
        for index, event in enumerate(recording.events[rank]):
            if event["kind"] == COMPUTE:
                for row in recording.costs[rank][event["first_cost"] : event["last_cost"]]:
                    now += int(row["count"]) * operator_seconds(recording.operators[row["operator"]])
                continue
            now = yield ("until", now)
            move = mine[int(event["target"])] if event["kind"] == WAIT else post(rank, index, event)
            mine[index] = move
            if event["kind"] != WAIT and not move.missing:
                move.ready = now
                if not move.ports:  # a group of one
                    move.start = move.end = now
            if event["kind"] == WAIT or event["blocking"]:
                now = yield ("move", move)
        yield ("until", now)
        finish[rank] = now

    finish = [None] * n
    programs = [program(r) for r in range(n)]
    doing = [next(p) for p in programs]
    now = 0.0
    while True:
        progress = True
        while progress:
            progress = False
            for rank in range(n):
                while doing[rank] is not None:
                    what, target = doing[rank]
                    until = target if what == "until" else target.end
                    if until is None or until > now:
                        break
                    try:
                        doing[rank] = programs[rank].send(now)
                    except StopIteration:
                        doing[rank] = None
                    progress = True
            waiting = sorted(
                (m for m in moves.values() if m.start is None and m.ready is not None), key=lambda m: (m.ready, m.priority)
            )
            for move in waiting:
                busy = {p for m in moves.values() if m.start is not None and m.end > now for p in m.ports}
                if not move.ports & busy:
                    move.start, move.end = now, now + move.seconds
                    progress = True
                    if move.seconds == 0:
                        break  # somebody may react in no time
        later = [m.end for m in moves.values() if m.end is not None and m.end > now]
        later += [d[1] for d in doing if d is not None and d[0] == "until" and d[1] > now]
        if not later:
            break
        now = min(later)
    assert all(f is not None for f in finish), "the second opinion found a deadlock"
    moved = sorted((m.start, m.end, m.priority) for m in moves.values() if m.start is not None)
    return max([*finish, *(end for _, end, _ in moved)], default=math.nan), moved
