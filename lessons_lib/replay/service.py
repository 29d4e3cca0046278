"""Who is served before whom at a port: which transfers compete, and the proof that an order of service holds in a lane.

Used by lanes, see there. Imports no torch.
"""

from __future__ import annotations

import numpy as np

MOST_KEPT = 16  # how far back along a port a check looks; beyond it the lane is simulated anew


def contests_of(plan, place: np.ndarray):
    """Who goes before whom at a port, where the rank in between has not waited for the earlier one.

    `plan` is a lanes.Plan, `place` the position of each transfer in the order of service. Returns four things: per transfer the
    one that certainly goes before at all its ports (-1: none); of the others, transfer: (predecessors, ports shared with them);
    transfer: ports at which a check may look at it; and all pairs (predecessor, transfer) of the second, as two arrays.
    """
    m, size = plan.m, len(plan.width)
    entry = m.transfer[plan.entry_post]
    moved = np.flatnonzero(place[entry] >= 0)
    moved = moved[np.lexsort((place[entry[moved]], plan.entry_port[moved]))]
    port, x, post, back = plan.entry_port[moved], entry[moved], plan.entry_post[moved], plan.entry_back[moved]
    follows = np.zeros(len(x), dtype=bool)
    follows[1:] = port[1:] == port[:-1]
    before = np.where(follows, np.roll(x, 1), -1)
    loose = follows & (np.roll(back, 1) >= post)
    # Same ports, and posts in the same order on every rank: the earlier one is ready first, so it goes first.
    certain = np.ones(size, dtype=bool)
    certain[x[~(follows & (np.roll(post, 1) < post))]] = False
    low, high = np.full(size, size), np.full(size, -2)
    np.minimum.at(low, x, before)
    np.maximum.at(high, x, before)
    certain &= (low == high) & (plan.width[np.clip(high, 0, None)] == plan.width)
    third = np.full(size, -1)
    sure = loose & certain[x]
    third[x[sure]] = before[sure]
    contests: dict[int, tuple[list, list]] = {}
    rest = loose & ~certain[x]
    for a, b, p in zip(x[rest].tolist(), before[rest].tolist(), port[rest].tolist()):
        known, shared = contests.setdefault(a, ([], []))
        if b not in known:
            known.append(b)
        shared.append(p)
    near = np.zeros(len(x), dtype=bool)  # whom a check may have to look at
    for back in range(1, MOST_KEPT + 1):
        place_of = np.flatnonzero(rest) - back
        place_of = place_of[place_of >= 0]
        near[place_of[port[place_of] == port[place_of + back]]] = True
    watched: dict[int, list[int]] = {}
    for a, p in zip(x[near].tolist(), port[near].tolist()):
        watched.setdefault(a, []).append(p)
    return third, contests, watched, (before[rest], x[rest])


def check(x: int, priority, ready, start, shared, history, good) -> None:
    """Clear `good` in lanes where transfer x would not have been served in this place.

    It would be if from the moment it is ready until it starts, one of its ports is always busy with transfers served before it, and
    each of those that starts in that time either has priority or starts while another port keeps x waiting anyway. `priority` None:
    what was ready at the same moment may have gone first or not.
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
    first = {k: priority is not None and priority[k[0]] < priority[x] for k in rows}
    ahead = {k: (since < ready) | ((since == ready) & first[k]) for k, (since, _, _) in rows.items()}
    for (y, p), (_, begun, _) in rows.items():
        rival = (begun >= ready) & ~ahead[y, p]
        if rival.any():
            for (z, q), (_, other, over) in rows.items():
                if z != y and q != p:  # did z keep another port of x busy when y began?
                    rival &= ~(((other < begun) | ((other == begun) & ahead[z, q])) & (begun < over))
            lost |= rival
    good[lanes[lost]] = False
