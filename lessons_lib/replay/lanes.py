"""One pass over a schedule with a whole axis of link settings ("lanes") at once, and the proof that it holds in each lane.

The simulation at one lane fixes in which order transfers are served. This pass keeps that order and computes, with one numpy
operation where the simulation adds or compares one number, the times in every lane. Where two transfers compete for a port and
the programs do not already order them, it checks lane by lane that the simulation would have served them in the same order.
Imports no torch.

A "node" is a moment, an array over the lanes: node x < T is the end of transfer x (of T), node T + i is the moment at which
operation i, a wait, lets its rank go on; the last node is time 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .matching import AWAIT, POST, Matching
from .pricing import Costs
from .service import MOST_KEPT, check, contests_of

SURE = 3  # an AWAIT of something that cannot have ended before the rank gets there
SKIP = 4  # an AWAIT among others in a row, for something that its port served before one of the others
BLOCK_SIZE = 64  # steps between two looks at which nodes are no longer needed


class Plan:
    """What a pass needs to know of a recording on a cluster, whatever the order of service."""

    def __init__(self, m: Matching, costs: Costs):
        self.m, self.costs = m, costs
        self.compiled: tuple[list[int], Steps] | None = None  # the last order of service, and its steps
        self.rank = rank = m.rank[m.operations]
        self.waits = waits = np.flatnonzero(m.mode != POST)
        posts = np.flatnonzero(m.mode != AWAIT)
        number = np.full(len(m.events), -1)
        number[m.operations] = np.arange(len(m.operations))
        origin = number[m.origin]
        self.before = before = np.array(costs.before)
        different, inverse = np.unique(np.append(before, 0.0), return_inverse=True)
        scalars = [np.array(b) if b else None for b in different.tolist()]  # numpy adds these fastest
        self.offset = np.empty(len(scalars), dtype=object)
        self.offset[:] = scalars
        self.which, self.none = inverse[:-1], inverse[-1]  # the last one stands for "no offset"

        # Nothing happened between the post and the wait: the rank certainly gets there before the transfer ends.
        stretch = np.searchsorted(waits, np.arange(len(m.operations)))  # how many waits came earlier
        same = (m.mode == AWAIT) & (stretch[origin] == stretch) & (before[origin] == before) & (rank[origin] == rank)
        self.mode = np.where(same, SURE, m.mode)

        pair = m.destination[m.transfer] >= 0
        sending = rank == m.source[m.transfer]
        self.width = np.array([len(p) for p in costs.ports], dtype=int)
        # Messages: their two posts. Collectives: all posts, one after the other.
        self.sent, self.received = np.full(len(self.width), -1), np.full(len(self.width), -1)
        for target, mine in ((self.sent, sending), (self.received, ~sending)):
            some = posts[pair[posts] & mine[posts]]
            target[m.transfer[some]] = some
        group_posts = posts[~pair[posts]]
        self.group_posts = group_posts[np.argsort(m.transfer[group_posts], kind="stable")]

        # Waits in a row, with nothing between them: per row and port only the one served last counts.
        awaits = m.mode == AWAIT
        follows = np.zeros(len(awaits), dtype=bool)
        follows[1:] = awaits[1:] & awaits[:-1] & (rank[1:] == rank[:-1]) & (before[1:] == 0)
        port = np.full(len(m.operations), -1)
        of_pair = posts[pair[posts]]
        ends = np.array([p if len(p) == 2 else (-1, -1) for p in costs.ports]).reshape(-1, 2)[m.transfer[of_pair]]
        port[of_pair] = np.where(sending[of_pair], ends[:, 0], ends[:, 1])
        self.in_row = np.flatnonzero(awaits & pair)
        self.row, self.row_port = np.cumsum(~follows)[self.in_row], port[origin[self.in_row]]

        # Entries: every use of a port by a post, with the first operation that waits for it.
        back = np.full(len(m.operations), np.iinfo(np.int64).max)
        np.minimum.at(back, origin[waits], waits)
        mine = [
            [p for p in costs.ports[x] if p // 4 == r] for x, r in zip(m.transfer[group_posts].tolist(), rank[group_posts].tolist())
        ]
        self.entry_post = np.concatenate([of_pair, np.repeat(group_posts, [len(p) for p in mine])])
        self.entry_port = np.concatenate([port[of_pair], np.array([p for some in mine for p in some], dtype=int)])
        self.entry_back = back[self.entry_post]


@dataclass(eq=False)
class Steps:
    """A pass as a list of steps: node = max(first + offset, second + offset, third), plus the duration if it is a transfer."""

    node: list[int]
    first: list[int]
    first_offset: list
    second: list[int]  # -1: none
    second_offset: list
    third: list[int]  # a transfer that certainly goes before at all ports, -1: none
    more: dict[int, list]  # transfer: (node, offset) of the posts beyond two
    contests: dict[int, tuple[list, list]]  # transfer: those that may go before, and the ports shared with them
    watched: dict[int, list[int]]  # transfer: the ports at which those in `contests` are checked against it
    special: set[int]  # transfers that need a longer look: in one of the three above, or waited for by nobody
    drop: list[list[int]]  # per block of steps: nodes not needed any more
    last: np.ndarray  # per rank: the node at which it comes back last


def compile_steps(plan: Plan, order: list[int]) -> Steps:
    """The steps that compute all times if transfers are served in `order`."""
    m, size = plan.m, len(plan.width)
    place = np.full(size, -1)
    place[order] = np.arange(len(order))
    mode = plan.mode.copy()
    turn = place[m.transfer[plan.in_row]]
    by_turn = np.lexsort((turn, plan.row_port, plan.row))
    row, port = plan.row[by_turn], plan.row_port[by_turn]
    earlier = plan.in_row[by_turn[:-1][(row[1:] == row[:-1]) & (port[1:] == port[:-1])]]
    mode[earlier[plan.before[earlier] == 0]] = SKIP

    waits = plan.waits[mode[plan.waits] != SKIP]
    after = np.where(mode[waits] == AWAIT, size + waits, m.transfer[waits])  # the node of each wait
    zero = size + len(mode)
    begin = m.first_operation

    def clock(operations, rank):
        """The node from which these operations' offsets count: their rank's last wait."""
        found = np.searchsorted(waits, operations) - 1
        real = (found >= 0) & (np.append(waits, 0)[found] >= begin[rank])
        return np.where(real, np.append(after, 0)[found], zero)

    # A wait can be computed once all that its rank waited for so far has been served.
    awaits = waits[mode[waits] == AWAIT]
    high = np.maximum.accumulate(place[m.transfer[waits]] + plan.rank[waits] * (size + 1)) - plan.rank[waits] * (size + 1)
    messages = np.array(order, dtype=int)
    node = np.concatenate([messages, size + awaits])
    moment = np.concatenate([2 * np.arange(len(messages)), 2 * high[mode[waits] == AWAIT] + 1])

    sent, received = plan.sent[messages], plan.received[messages]
    first, second = clock(sent, plan.rank[sent]), clock(received, plan.rank[received])
    first_which, second_which = plan.which[sent], plan.which[received]
    together = first == second  # both sides count from the same moment: only the later post matters
    first_which = np.where(together, np.maximum(first_which, second_which), first_which)  # offsets are numbered in rising order
    second = np.where(together, -1, second)
    columns = [
        node,
        np.concatenate([first, clock(awaits, plan.rank[awaits])]),
        np.concatenate([first_which, plan.which[awaits]]),
        np.concatenate([second, m.transfer[awaits]]),
        np.concatenate([second_which, np.full(len(awaits), plan.none)]),
        np.full(len(node), -1),
    ]
    more: dict[int, list] = {}
    group_clock = clock(plan.group_posts, plan.rank[plan.group_posts])
    for x, base, which in zip(*(c.tolist() for c in (m.transfer[plan.group_posts], group_clock, plan.which[plan.group_posts]))):
        known = more.setdefault(x, {})
        known[base] = max(which, known.get(base, -1))
    grouped = np.flatnonzero(m.destination[messages] < 0)
    for k, x in zip(grouped.tolist(), messages[grouped].tolist()):
        (base, which), *rest = more.pop(x).items()
        columns[1][k], columns[2][k], columns[3][k] = base, which, -1
        if rest:
            more[x] = rest
    third, contests, watched, predecessors = contests_of(plan, place)
    columns[5][: len(messages)] = third[messages]

    awaited = np.zeros(size, dtype=bool)
    awaited[m.transfer[plan.waits]] = True
    special = set(messages[~awaited[messages]].tolist()) | set(more) | set(contests) | set(watched)

    by_moment = np.argsort(moment, kind="stable")
    columns = [column[by_moment] for column in columns]
    at = np.arange(len(node))
    use = np.full(zero + 1, -1)
    use[columns[0]] = at
    step_of = use.copy()
    for column in (columns[1], columns[3], columns[5]):
        real = column >= 0
        np.maximum.at(use, column[real], at[real])
    np.maximum.at(use, predecessors[0], step_of[predecessors[1]])
    for x, rest in more.items():
        if step_of[x] >= 0:
            for base, _ in rest:
                use[base] = max(use[base], step_of[x])
    last = clock(begin[1:], np.arange(m.world_size))
    use[last] = len(node)
    use[zero] = len(node)
    ending = np.flatnonzero((use >= 0) & (use < len(node)))
    ending = ending[np.argsort(use[ending], kind="stable")]
    edges = np.searchsorted(use[ending], np.arange(0, len(node) + BLOCK_SIZE, BLOCK_SIZE))
    drop = [ending[a:b].tolist() for a, b in zip(edges, edges[1:])]
    offset = plan.offset
    more = {x: [(base, offset[which]) for base, which in rest] for x, rest in more.items()}
    lists = [offset[c].tolist() if k in (2, 4) else c.tolist() for k, c in enumerate(columns)]
    return Steps(*lists, more, contests, watched, special, drop, last)


def run(plan: Plan, order: list[int], seconds, lanes: int, instant: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Step times in every lane if transfers are served in `order`; and in which lanes they certainly are.

    `seconds[x]` is the array of one transfer's durations. Times are the very floating-point numbers that the simulation computes.
    `instant` says that some transfers may take no time at all: then causes and effects share a moment, and priorities do not tell
    which came first.
    """
    if plan.compiled is None or plan.compiled[0] is not order:
        plan.compiled = (order, compile_steps(plan, order))
    steps = plan.compiled[1]
    m, size = plan.m, len(plan.width)
    add, maximum = np.add, np.maximum
    value: list = [None] * (size + len(m.operations) + 1)
    value[-1] = final = np.zeros(lanes)
    awaited = set(m.transfer[plan.waits].tolist())
    history: dict[int, list] = {p: [] for _, shared in steps.contests.values() for p in shared}
    good = np.ones(lanes, dtype=bool)
    special, more, contests, watched = steps.special, steps.more, steps.contests, steps.watched
    columns = (steps.node, steps.first, steps.first_offset, steps.second, steps.second_offset, steps.third)
    priority = None if instant else m.priority
    # Arrays are used again: asking the system for new ones would take longer than the arithmetic.
    one, two = np.empty(lanes), np.empty(lanes)
    pool: list[np.ndarray] = []
    for block, drop in enumerate(steps.drop):
        part = slice(block * BLOCK_SIZE, (block + 1) * BLOCK_SIZE)
        for node, first, first_offset, second, second_offset, third in zip(*(column[part] for column in columns)):
            mine = pool.pop() if pool else np.empty(lanes)
            ready = value[first]
            if first_offset is not None:
                ready = add(ready, first_offset, one)
            if second >= 0:
                other = value[second]
                if second_offset is not None:
                    other = add(other, second_offset, two)
                ready = maximum(ready, other, out=mine)
            if node >= size:
                value[node] = ready
                continue
            if node not in special:
                if third >= 0:
                    ready = maximum(ready, value[third], out=mine)
                value[node] = add(ready, seconds[node], mine)
                continue
            ready = ready.copy()
            for base, offset in more.get(node, ()):
                maximum(ready, value[base] if offset is None else add(value[base], offset, two), out=ready)
            start = ready if third < 0 else maximum(ready, value[third])
            if node in contests:
                known, shared = contests[node]
                for y in known:
                    start = maximum(start, value[y])
                check(node, priority, ready, start, shared, history, good)
            value[node] = end = add(start, seconds[node], mine)
            if node not in awaited:
                final = maximum(final, end)  # nobody waits for it: the step lasts until it ends
            for p in watched.get(node, ()):
                queue = history[p]
                queue.append((node, ready, start, end))
                if len(queue) > MOST_KEPT:
                    del queue[0]
        pool += [value[node] for node in drop if node not in watched]  # of those, `history` may still have need
        for node in drop:
            value[node] = None
    for node, tail in zip(steps.last.tolist(), plan.costs.tail):
        final = maximum(final, value[node] + tail)
    return final, good
