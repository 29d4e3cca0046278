"""The orders of well-known pipeline schedules for p ranks and m microbatches.

GPipe [arXiv:1811.06965], 1F1B [arXiv:2006.09503, with flushes], interleaved 1F1B [arXiv:2104.04473], ZB-H1 [arXiv:2401.10241].
Imports no torch.
"""

from __future__ import annotations

from .actions import MOST, MOST_ACTIONS, Action, ScheduleError, number, size_of, whole, yes_or_no

UNKNOWN = "none that I know"
MOST_SEARCHED = 200_000


def gpipe(p: int, m: int) -> list[list[Action]]:
    """All forwards, then all backwards: m in flight on every rank. With m = 1 everybody waits: one microbatch, through and back."""
    p, m = _sizes(p, m)
    return [[Action("F", i) for i in range(m)] + [Action("B", i) for i in range(m)] for _ in range(p)]


def one_f_one_b(p: int, m: int) -> list[list[Action]]:
    """Warm-up: p - 1 - rank forwards. Steady state: one forward, one backward. Cool-down: the backwards that are left.

    At most min(m, p - rank) are in flight. Source: arXiv:2104.04473, figure 4 (top), as in Megatron-LM.
    """
    p, m = _sizes(p, m)
    orders = []
    for rank in range(p):
        warm_up = min(p - 1 - rank, m)
        order = [Action("F", i) for i in range(warm_up)]
        for i in range(m - warm_up):
            order += [Action("F", warm_up + i), Action("B", i)]
        orders.append(order + [Action("B", i) for i in range(m - warm_up, m)])
    return orders


def interleaved(p: int, m: int, v: int) -> list[list[Action]]:
    """1F1B with v chunks a rank: p microbatches through one chunk, then the same p through the next. p must divide m.

    Warm-up: 2(p - 1 - rank) + (v - 1)p forwards. Source: arXiv:2104.04473, section 2.2, figure 4 (bottom), as in Megatron-LM.
    """
    v = whole(v, "The number of chunks v", 1, MOST["chunks"])
    p, m = _sizes(p, m, v)
    if v == 1:
        return one_f_one_b(p, m)
    if m % p:
        raise ScheduleError(f"Interleaved 1F1B takes microbatches in groups of p = {p}, but m is {m}: choose a multiple of {p}.")
    forwards = [(first + i, c) for first in range(0, m, p) for c in range(v) for i in range(p)]
    backwards = [(first + i, c) for first in range(0, m, p) for c in reversed(range(v)) for i in range(p)]
    orders = []
    for rank in range(p):
        warm_up = min(2 * (p - 1 - rank) + (v - 1) * p, m * v)
        order = [Action("F", *one) for one in forwards[:warm_up]]
        for forward, backward in zip(forwards[warm_up:], backwards):
            order += [Action("F", *forward), Action("B", *backward)]
        orders.append(order + [Action("B", *one) for one in backwards[m * v - warm_up :]])
    return orders


def zero_bubble_h1(p: int, m: int) -> list[list[Action]]:
    """1F1B whose backward is split: B, the gradient of the input, as early as can be; W, that of the weights, `rank` rounds later.

    No rank keeps more microbatches than the first one does under 1F1B, p. Source: arXiv:2401.10241, section 2 (ZB-H1).
    """
    orders = []
    for rank, order in enumerate(one_f_one_b(p, m)):
        split, done = [], 0
        for one in order:
            split.append(one)
            if one.kind == "B" and one.microbatch >= rank:
                split.append(Action("W", done))
                done += 1
        orders.append(split + [Action("W", i) for i in range(done, m)])
    return orders


def _sizes(p, m, v=1) -> tuple[int, int]:
    p = whole(p, "The number of ranks p", 1, MOST["ranks"])
    m = whole(m, "The number of microbatches m", 1, MOST["microbatches"])
    if p * m * v > MOST_ACTIONS:
        raise ScheduleError(
            f"p = {p:,} ranks with m = {m:,} microbatches{f' in v = {v} chunks' if v > 1 else ''} are too many actions."
        )
    return p, m


# ---- which is it -------------------------------------------------------------------------------------------------------------


def recognise_orders(orders: list[list[Action]]) -> str:
    """The name of these orders: "GPipe", "1F1B", "interleaved 1F1B", "ZB-H1"; or "none that I know"."""
    if not any(orders):
        return UNKNOWN
    p, (m, v, split) = len(orders), size_of(orders)
    if p * m * v > MOST_ACTIONS:
        return UNKNOWN
    if split:
        return "ZB-H1" if v == 1 and orders == zero_bubble_h1(p, m) else UNKNOWN
    if v > 1:
        return "interleaved 1F1B" if m % p == 0 and orders == interleaved(p, m, v) else UNKNOWN
    if m == 1 and orders == gpipe(p, 1):
        return "one microbatch at a time"
    if orders == one_f_one_b(p, m):
        return "1F1B"
    halves = [([one.kind for one in order], order[:m], order[m:]) for order in orders]
    alike = all(kinds == ["F"] * m + ["B"] * m for kinds, _, _ in halves)
    # the paper draws its backwards from the last microbatch to the first; Megatron-LM and PyTorch run them first to last
    same = all(forwards == halves[0][1] and backwards == halves[0][2] for _, forwards, backwards in halves)
    complete = sorted(halves[0][1] + halves[0][2]) == sorted(gpipe(1, m)[0])
    return "GPipe" if alike and same and complete else UNKNOWN


# ---- one that takes what is ready --------------------------------------------------------------------------------------------


def greedy(p, m, in_flight=None, split=False, forward=1, backward=1, weight=1, hop=0) -> list[list[Action]]:
    """Whenever a rank is free it takes what is ready: B before F before W, and no F while it keeps `in_flight` microbatches.

    A microbatch is kept until its last gradient. One chunk a rank; equal stages.
    """
    p, m = _sizes(p, m)
    split = yes_or_no(split, "split")
    if p * p * m > MOST_SEARCHED:
        raise ScheduleError(f"p = {p:,} ranks with m = {m:,} microbatches take too long here: p x p x m may be {MOST_SEARCHED:,}.")
    limit = m if in_flight is None else whole(in_flight, "in_flight (microbatches kept on a rank)", 1, MOST["microbatches"])
    ends = {kind: [[] for _ in range(p)] for kind in "FBW"}  # when each microbatch is through, for every rank
    length = {k: number(t, name) for k, t, name in zip("FBW", (forward, backward, weight), ("forward", "backward", "weight"))}
    hop = number(hop, "hop (the time of a message)", closed=True)
    free, orders = [0] * p, [[] for _ in range(p)]

    def ready(rank, kind):
        """When the next of this kind can begin at the earliest; None: not known yet."""
        i = len(ends[kind][rank])
        if i == m:
            return None
        if kind == "W":
            return ends["B"][rank][i] if i < len(ends["B"][rank]) else None
        if kind == "F":
            last = ends["W" if split else "B"][rank]
            if i - len(last) >= limit:
                return None
            other = rank - 1
        else:
            if i >= len(ends["F"][rank]):
                return None
            other = rank + 1
        if not 0 <= other < p:
            return 0 if kind == "F" else ends["F"][rank][i]
        return ends[kind][other][i] + hop if i < len(ends[kind][other]) else None

    while any(len(order) < m * (2 + split) for order in orders):
        first = None
        for rank in range(p):
            for turn, kind in enumerate("BFW" if split else "BF"):
                moment = ready(rank, kind)
                if moment is not None:
                    found = (max(moment, free[rank]), rank, turn, kind)
                    first = found if first is None else min(first, found)
        begin, rank, _, kind = first
        orders[rank].append(Action(kind, len(ends[kind][rank])))
        free[rank] = begin + length[kind]
        ends[kind][rank].append(free[rank])
    return orders
