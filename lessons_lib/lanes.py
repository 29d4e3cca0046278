"""One pass over a schedule with a whole axis of link settings ("lanes") at once, and the proof that it holds in each lane.

The simulation at one lane fixes in which order transfers are served. This pass keeps that order and computes, with one numpy
operation where the simulation adds or compares one number, the times in every lane. Where two transfers compete for a port and
the programs do not already order them, it checks lane by lane that the simulation would have served them in the same order.
Imports no torch.
"""

from __future__ import annotations

import numpy as np

from .matching import AWAIT, POST, Matching
from .pricing import Costs

SURE = 3  # an AWAIT of something that cannot have ended before the rank gets there
SKIP = 4  # an AWAIT right before another one for something that the same port served later
MOST_KEPT = 16  # how far back along a port a check looks; beyond it the lane is simulated anew


class Plan:
    """What a pass needs to know of a recording on a cluster, whatever the order of service."""

    def __init__(self, m: Matching, costs: Costs):
        self.m, self.costs = m, costs
        rank = m.rank[m.operations]
        waits = np.flatnonzero(m.mode != POST)
        posts = np.flatnonzero(m.mode != AWAIT)
        number = np.full(len(m.events), -1)
        number[m.operations] = np.arange(len(m.operations))
        origin = number[m.origin]
        before = np.array(costs.before)

        # Nothing happened between the post and the wait: the rank certainly gets there before the transfer ends.
        stretch = np.searchsorted(waits, np.arange(len(m.operations)))  # how many waits came earlier
        same = (stretch[origin] == stretch) & (before[origin] == before) & (m.mode == AWAIT) & (rank[origin] == rank)
        self.mode = np.where(same, SURE, m.mode)

        # Waits in a row, with nothing between them: per row and port only the one served last counts.
        awaits = m.mode == AWAIT
        follows = np.zeros(len(awaits), dtype=bool)
        follows[1:] = awaits[1:] & awaits[:-1] & (rank[1:] == rank[:-1]) & (before[1:] == 0)
        row = np.cumsum(~follows)
        single = np.flatnonzero(awaits & (m.destination[m.transfer] >= 0))
        self.row_wait, self.row = single, row[single]

        back = np.full(len(m.operations), np.iinfo(np.int64).max)  # per post: the first operation that waits for it
        np.minimum.at(back, origin[waits], waits)
        ports = costs.ports
        width = np.array([len(p) for p in ports], dtype=int)
        source_side = rank[posts] == m.source[m.transfer[posts]]
        pair = m.destination[m.transfer[posts]] >= 0
        port = np.array(
            [ports[x][0 if s else 1] if p else -1 for x, s, p in zip(m.transfer[posts].tolist(), source_side, pair)], dtype=int
        )
        entry_post, entry_port = [posts[pair]], [port[pair]]
        for i in posts[~pair].tolist():
            r, x = rank[i], m.transfer[i]
            mine = [p for p in ports[x] if p // 4 == r]
            entry_post.append(np.full(len(mine), i))
            entry_port.append(np.array(mine, dtype=int))
        port_of = np.full(len(m.operations), -1)
        port_of[posts] = port
        self.row_port = port_of[origin[single]]
        self.entry_post, self.entry_port = np.concatenate(entry_post), np.concatenate(entry_port)
        self.entry_transfer = m.transfer[self.entry_post]
        self.entry_back = back[self.entry_post]
        self.width = width
        self.waits = waits

    def modes(self, order: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """For an order of service: per operation its mode, per transfer how many waits need its end."""
        place = np.full(len(self.width), -1)
        place[order] = np.arange(len(order))
        turn = place[self.m.transfer[self.row_wait]]
        by_turn = np.lexsort((turn, self.row_port, self.row))
        row, port = self.row[by_turn], self.row_port[by_turn]
        dominated = (row[1:] == row[:-1]) & (port[1:] == port[:-1])
        mode = self.mode.copy()
        mode[self.row_wait[by_turn[:-1][dominated]]] = SKIP
        needed = self.waits[mode[self.waits] != SKIP]
        return mode, np.bincount(self.m.transfer[needed], minlength=len(self.width))

    def contests(self, order: list[int]) -> tuple[dict[int, tuple], np.ndarray]:
        """For an order of service: per transfer, those just before it at its ports that its ranks have not waited for.

        Each has (predecessors, None) where they certainly go first, else (predecessors, ports that they share with it).
        The second result counts, per transfer, how often it is a predecessor.
        """
        place = np.full(len(self.width), -1)
        place[order] = np.arange(len(order))
        moved = np.flatnonzero(place[self.entry_transfer] >= 0)
        moved = moved[np.lexsort((place[self.entry_transfer[moved]], self.entry_port[moved]))]
        port, x = self.entry_port[moved], self.entry_transfer[moved]
        post, back = self.entry_post[moved], self.entry_back[moved]
        follows = np.zeros(len(x), dtype=bool)
        follows[1:] = port[1:] == port[:-1]
        before = np.where(follows, np.roll(x, 1), -1)
        loose = follows & (np.roll(back, 1) >= post)
        # Same ports, same order of posts on every rank: the earlier one is ready first, so it goes first.
        fixed = follows & (np.roll(post, 1) < post)
        size = len(self.width)
        low, high = np.full(size, size), np.full(size, -2)
        np.minimum.at(low, x, before)
        np.maximum.at(high, x, before)
        certain = np.ones(size, dtype=bool)
        certain[x[~fixed]] = False
        certain &= (low == high) & (self.width[np.clip(high, 0, None)] == self.width)
        found: dict[int, tuple] = {}
        uses = np.zeros(size, dtype=int)
        for a, b, p, sure in zip(x[loose].tolist(), before[loose].tolist(), port[loose].tolist(), certain[x[loose]].tolist()):
            known, shared = found.setdefault(a, ([], None if sure else []))
            if b not in known:
                known.append(b)
                uses[b] += 1
            if shared is not None:
                shared.append(p)
        return found, uses


def run(plan: Plan, order: list[int], seconds, lanes: int) -> tuple[np.ndarray, np.ndarray]:
    """Step times in every lane if transfers are served in `order`; and in which lanes they certainly are.

    `seconds(x)` is the array of one transfer's durations. Times are the very floating-point numbers that the simulation computes.
    """
    m, costs = plan.m, plan.costs
    add, maximum = np.add, np.maximum
    contests, extra = plan.contests(order)
    modes, needed = plan.modes(order)
    uses = (needed + extra).tolist()
    awaited = np.zeros(len(uses), dtype=bool)
    awaited[m.transfer[plan.waits]] = True
    transfer, mode, before, awaited = m.transfer.tolist(), modes.tolist(), costs.before, awaited.tolist()
    ports = costs.ports
    cursor, last = m.first_operation[:-1].tolist(), m.first_operation[1:].tolist()
    clock = [np.zeros(lanes)] * m.world_size  # per rank: when it last came back from waiting
    posted: dict[int, tuple] = {}  # per transfer: (clock, seconds since) of the latest post so far
    ends: dict[int, np.ndarray] = {}
    waiting: dict[int, list[tuple[int, int]]] = {}
    watched = {p for _, shared in contests.values() if shared for p in shared}
    history: dict[int, list] = {p: [] for p in watched}
    good = np.ones(lanes, dtype=bool)
    final = np.zeros(lanes)
    scalar: dict[float, np.ndarray] = {}

    def later(base, offset):
        if not offset:
            return base
        value = scalar.get(offset)
        if value is None:
            value = scalar[offset] = np.array(offset)
        return add(base, value)

    def go_on(rank: int) -> None:
        now = clock[rank]
        for i in range(cursor[rank], last[rank]):
            x, what = transfer[i], mode[i]
            if what < AWAIT:
                mine = (now, before[i])
                if x in posted:
                    theirs = posted[x]
                    if theirs[0] is now:
                        if theirs[1] > mine[1]:
                            mine = theirs
                    else:
                        mine = (maximum(later(*theirs), later(*mine)), 0.0)
                posted[x] = mine
                if what == POST:
                    continue
            elif what == SKIP:
                now = later(now, before[i])
                continue
            over = ends.get(x)
            if over is None:
                waiting.setdefault(x, []).append((rank, i))
                clock[rank] = now
                cursor[rank] = i + 1
                return
            now = over if what != AWAIT else maximum(later(now, before[i]), over)
            uses[x] -= 1
            if not uses[x]:
                del ends[x]
        cursor[rank] = last[rank]
        maximum(final, later(now, costs.tail[rank]), out=final)

    for rank in range(m.world_size):
        go_on(rank)
    for x in order:
        base, offset = posted.pop(x)
        begin = since = later(base, offset)
        contest = contests.get(x)
        if contest is not None:
            known, shared = contest
            for y in known:
                begin = maximum(begin, ends[y])
                uses[y] -= 1
            if shared is not None:
                _check(x, m.priority, since, begin, shared, history, good)
            for y in known:
                if not uses[y]:
                    del ends[y]
        over = add(begin, seconds(x))
        if watched:
            for p in ports[x]:
                if p in watched:
                    queue = history[p]
                    queue.append((x, since, begin, over))
                    if len(queue) > MOST_KEPT:
                        del queue[0]
        blocked = waiting.pop(x, None)
        if uses[x]:
            ends[x] = over
        if not awaited[x]:
            maximum(final, over, out=final)  # nobody waits for it: the step lasts until it ends
        for rank, i in blocked or ():
            clock[rank] = over if mode[i] != AWAIT else maximum(later(clock[rank], before[i]), over)
            uses[x] -= 1
            if not uses[x]:
                ends.pop(x, None)
            go_on(rank)
    return final, good


def _check(x: int, priority, ready, start, shared, history, good) -> None:
    """Clear `good` in lanes where transfer x would not have been served in this place.

    It would be if from the moment it is ready until it starts, one of its ports is always busy with transfers served before it, and
    each of those that starts in that time either has priority or starts while another port keeps x waiting anyway.
    """
    late = start > ready
    if not late.any():
        return
    # Usual: the transfer that x waits for last had begun before x was ready.
    for p in shared:
        _, _, begun, over = history[p][-1]
        late &= (over < start) | (begun >= ready)
    lanes = np.flatnonzero(late & good)
    if not len(lanes):
        return
    ready, start = ready[lanes], start[lanes]
    rows = {}
    lost = np.zeros(len(lanes), dtype=bool)
    for p in shared:
        queue = history[p]
        for y, since, begun, over in reversed(queue):
            begun = begun[lanes]
            rows[y, p] = (since[lanes], begun, over[lanes])
            if (begun < ready).all():
                break  # what is older had ended before x was ready
        else:
            if len(queue) == MOST_KEPT:
                lost |= begun >= ready  # older ones, no longer kept, may matter
    covered = start.copy()
    for _, begun, over in sorted(rows.values(), key=lambda row: -row[1][0]):
        covered = np.where((begun < covered) & (over >= covered), begun, covered)
    lost |= covered > ready
    ahead = {k: (since < ready) | ((since == ready) & (priority[k[0]] < priority[x])) for k, (since, _, _) in rows.items()}
    for (y, p), (_, begun, _) in rows.items():
        rival = (begun >= ready) & ~ahead[y, p]
        if rival.any():
            for (z, q), (_, other, over) in rows.items():
                if z != y and q != p:  # did z keep another port of x busy when y began?
                    rival &= ~(((other < begun) | ((other == begun) & ahead[z, q])) & (begun < over))
            lost |= rival
    good[lanes[lost]] = False
