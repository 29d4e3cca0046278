"""A pipeline schedule is data: a table of (rank, time, kind, microbatch, chunk). Made from orders, or written by hand.

    schedule = timed(one_f_one_b(4, 8))                    # every action as early as it can be
    schedule = timed(gpipe(4, 8), forward=1, backward=2)
    schedule = check_schedule(table_from(["F0 F1 .  .  B0 B1", ".  F0 F1 B0 B1 ."]))

Times are in slots, or in any unit: whole numbers, fractions or floats. Slot 5 begins at time 5 and ends at time 6. Actions are in
`actions`, well-known orders in `known_schedules`, the table in `schedule_table`; all can be had from here. Imports no torch.
"""

from __future__ import annotations

from .actions import (
    KINDS,
    MOST,
    Action,
    ScheduleError,
    action,
    check_orders,
    needs,
    number,
    orders_from,
    shown,
    size_of,
    whole,
    yes_or_no,
)
from .known_schedules import gpipe, greedy, interleaved, one_f_one_b, zero_bubble_h1
from .schedule_table import Cell, Schedule, recognise

__all__ = [
    "Action", "Cell", "Schedule", "ScheduleError", "action", "check_blocking_sends", "check_orders", "check_schedule", "gpipe",
    "greedy", "interleaved", "one_f_one_b", "orders_from", "par", "recognise", "stage_times", "table_from", "timed",
    "zero_bubble_h1",
]  # fmt: skip


# ---- from orders -----------------------------------------------------------------------------------------------------------


def timed(orders, forward=1, backward=1, weight=1, hop=0) -> Schedule:
    """Every rank runs its order, each action as early as it can: when what it needs has ended, and has come over by `hop`.

    `forward`, `backward`, `weight`: how long F, B and W take, each a number, or a list with one for every stage (stage c x p + r is
    chunk c of rank r). Where the orders have no W, B is the whole backward: give backward=2 if it takes twice a forward.
    ScheduleError if an action is missing or there twice, or if the orders wait for each other in a circle, which it names.
    """
    orders = check_orders(orders)
    p, (m, v, _) = len(orders), size_of(orders)
    seconds = {"F": stage_times(forward, "forward", p * v), "B": stage_times(backward, "backward", p * v)}
    seconds["W"] = stage_times(weight, "weight", p * v)
    hop = number(hop, "hop (the time of a message)", closed=True)
    ends = {kind: [[None] * m for _ in range(p * v)] for kind in KINDS}
    at, clock, cells = [0] * p, [0] * p, [[] for _ in range(p)]
    forwards, backwards = ends["F"], ends["B"]
    over = hop if p > 1 else 0
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while at[rank] < len(order):
                kind, i, c = one = order[at[rank]]
                stage = c * p + rank
                if kind == "F":
                    ready = 0 if stage == 0 else forwards[stage - 1][i]
                    ready = None if ready is None else ready + (over if stage else 0)
                else:
                    ready = (forwards if kind == "B" else backwards)[stage][i]
                    if kind == "B" and ready is not None and stage < p * v - 1:
                        after = backwards[stage + 1][i]
                        ready = None if after is None else max(ready, after + over)
                if ready is None:
                    break
                start, length = max(ready, clock[rank]), seconds[kind][stage]
                ends[kind][stage][i] = clock[rank] = start + length
                cells[rank].append(Cell(rank, start, *one, length))
                at[rank] += 1
                moved = True
    if any(at[rank] < len(order) for rank, order in enumerate(orders)):
        raise ScheduleError(_circle(orders, at, v))
    return Schedule(p, tuple(cell for row in cells for cell in row), hop)


def stage_times(value, name: str, stages: int) -> list:
    """One time for each stage: `value` for all, or a list of them. ScheduleError says what is allowed."""
    what = f"{name} (the time of an action)"
    if not isinstance(value, (list, tuple)):
        return [number(value, what)] * stages
    if len(value) != stages:
        raise ScheduleError(f"{name} has {len(value)} times, but there are {stages} stages: give one for each, or a single number.")
    return [number(one, f"{what} of stage {stage}") for stage, one in enumerate(value)]


def _circle(orders, at, chunks: int) -> str:
    """Who waits for whom, from a rank that cannot go on to the first that is met twice."""
    rank = next(r for r, order in enumerate(orders) if at[r] < len(order))
    seen: list[int] = []
    steps: dict[int, str] = {}
    while rank not in seen:
        seen.append(rank)
        one, done = orders[rank][at[rank]], [set(order[:n]) for order, n in zip(orders, at)]
        other, needed = next((r, a) for r, a in needs(one, rank, len(orders), chunks) if a not in done[r])
        late = f"rank {other} has {needed} only after {orders[other][at[other]]}"
        own = f"{needed}, which comes later in its own order"
        steps[rank] = f"rank {rank} cannot run {one} before " + (own if other == rank else f"{needed} of rank {other}, and {late}")
        rank = other
    return "These orders wait for each other for ever: " + "; ".join(steps[r] for r in seen[seen.index(rank) :]) + "."


# ---- by hand ---------------------------------------------------------------------------------------------------------------


def table_from(rows, forward=1, backward=1, weight=1, hop=0) -> Schedule:
    """A schedule as written, right or wrong: check_schedule() says whether it can run.

    `rows`: for each rank a text with one word a slot, "F0 F1 . B0", in a list or as lines of one text; "." is idle, "~" means that
    the action before is still running. Or the table itself: (rank, time, kind, microbatch) or (..., chunk) or
    (..., chunk, duration), in any order.
    """
    if isinstance(rows, str):
        rows = [line for line in rows.splitlines() if line.strip()]
    if not isinstance(rows, (list, tuple)) or not rows:
        raise ScheduleError(f"A table is a list with one text for each rank, such as ['F0 F1 .', '. F0 F1'], not {rows!r}.")
    found: list[tuple] = []
    if all(isinstance(row, str) for row in rows):
        ranks = whole(len(rows), "The number of ranks", 1, MOST["ranks"])
        for rank, row in enumerate(rows):
            for slot, word in enumerate(row.rpartition("|")[2].split()):
                if word.strip(".~-"):
                    found.append((rank, slot, *_read(word, f"rank {rank}, slot {slot}")))
    else:
        for row in rows:
            if not isinstance(row, (list, tuple)) or not 4 <= len(row) <= 6:
                raise ScheduleError(f"A row of the table is (rank, time, kind, microbatch) or (..., chunk), not {row!r}.")
            rank = whole(row[0], "The rank of a row", 0, MOST["ranks"] - 1)
            time = number(row[1], f"The time of a row of rank {rank}", closed=True)
            length = [number(row[5], f"The duration of a row of rank {rank}")] if len(row) == 6 else []
            found.append((rank, time, *_read(tuple(row[2:5]), f"rank {rank}, slot {shown(time)}"), *length))
        ranks = max(row[0] for row in found) + 1
    stages = ranks * (max((row[4] for row in found), default=0) + 1)
    times = {k: stage_times(value, KINDS[k].split()[0], stages) for k, value in zip("FBW", (forward, backward, weight))}
    cells = [Cell(*row[:5], *(row[5:] or [times[row[2]][row[4] * ranks + row[0]]])) for row in sorted(found, key=lambda r: r[:2])]
    return Schedule(ranks, tuple(cells), number(hop, "hop (the time of a message)", closed=True))


def _read(word, where: str) -> Action:
    try:
        return action(word)
    except ScheduleError as error:
        raise ScheduleError(f"At {where}: {error}") from None


# ---- checks ----------------------------------------------------------------------------------------------------------------


def check_schedule(schedule: Schedule, ranks=None, microbatches=None, chunks=None, split=None) -> Schedule:
    """The schedule, if it can run; else ScheduleError with the first thing that is impossible.

    Every action once; one at a time on a rank; nothing before what it needs. Sizes that are not given are taken from the table: say
    them where a missing microbatch must be noticed. `split`: whether there must be W.
    """
    if not isinstance(schedule, Schedule):
        raise TypeError(
            f"A Schedule is needed, from table_from(...) or timed(...), not {schedule!r} (a {type(schedule).__name__})."
        )
    if ranks is not None and schedule.ranks != whole(ranks, "The number of ranks", 1, MOST["ranks"]):
        raise ScheduleError(f"The schedule has rows for {schedule.ranks} rank{'s'[: schedule.ranks > 1]}, but there are {ranks}.")
    orders = check_orders(schedule.orders, microbatches, chunks, split)
    p, v = schedule.ranks, max(schedule.chunks, chunks or 1)
    ends = {(cell.rank, cell.action): cell.end for cell in schedule.cells}
    before = {(r, one): earlier for r, order in enumerate(orders) for earlier, one in zip(order, order[1:])}
    for cell in sorted(schedule.cells, key=lambda cell: (cell.time, cell.rank)):
        one, rank, time = cell.action, cell.rank, cell.time
        earlier = before.get((rank, one))
        if earlier and ends[rank, earlier] > time:
            raise ScheduleError(
                f"rank {rank} starts {one} at slot {shown(time)}, but it runs {earlier} until slot {shown(ends[rank, earlier])}: "
                "a rank does one thing at a time."
            )
        for other, needed in needs(one, rank, p, v):
            end, over = ends[other, needed], schedule.hop if other != rank else 0
            if end + over > time:
                raise ScheduleError(_too_early(rank, one, time, other, needed, end, over))
    return schedule


def _too_early(rank, one, time, other, needed, end, over) -> str:
    who = f"rank {other}" if other != rank else "it"
    late = f"rank {rank} runs {one} at slot {shown(time)}, but {who} finishes {needed} at slot {shown(end)}"
    late += f", and its message takes {shown(over)} more" if over else ""
    why = {
        ("F", "F"): "the forward of a stage needs what the stage before gives",
        ("B", "F"): "a backward needs its own forward",
        ("B", "B"): "the backward of a stage needs the gradient from the stage after",
        ("W", "B"): "the gradient of the weights needs the gradient that B hands on",
    }[one.kind, needed.kind]
    return f"{late}: {why}."


def check_blocking_sends(orders) -> list[list[Action]]:
    """The orders, if they can also run when every send waits for its receiver; else ScheduleError with the circle.

    A rank receives what an action needs, runs it, and sends the result at once, each call blocking, as dist.send may.
    """
    orders = check_orders(orders)
    p, v = len(orders), size_of(orders)[1]
    timed(orders)
    readers = {n: (r, one) for r, order in enumerate(orders) for one in order for n in needs(one, r, p, v) if n[0] != r}
    calls = []
    for rank, order in enumerate(orders):
        steps = []
        for one in order:
            steps += [("receive", other, (other, a)) for other, a in needs(one, rank, p, v) if other != rank]
            steps += [("send", readers[rank, one][0], (rank, one))] if (rank, one) in readers else []
        calls.append(steps)
    at = [0] * p
    moved = True
    while moved:
        moved = False
        for rank in range(p):
            while at[rank] < len(calls[rank]):
                _, other, what = calls[rank][at[rank]]
                if at[other] == len(calls[other]) or calls[other][at[other]][1:] != (rank, what):
                    break
                at[rank], at[other], moved = at[rank] + 1, at[other] + 1, True
    stuck = [rank for rank in range(p) if at[rank] < len(calls[rank])]
    if stuck:
        rank, seen = stuck[0], []
        while rank not in seen:
            seen.append(rank)
            rank = calls[rank][at[rank]][1]
        said = []
        for r in seen[seen.index(rank) :]:
            call, other, (_, one) = calls[r][at[r]]
            said.append(f"rank {r} waits to {call} {one} {'to' if call == 'send' else 'from'} rank {other}")
        raise ScheduleError(
            f"With blocking sends these ranks wait for each other for ever: {'; '.join(said)}. Start the sends with "
            "dist.isend, and wait for them later."
        )
    return orders


# ---- how good it can be ------------------------------------------------------------------------------------------------------


def par(p, m, in_flight=None, split=False, forward=1, backward=1, weight=1, hop=0) -> Schedule:
    """The shortest schedule known here that keeps at most `in_flight` microbatches on every rank: something to reach or to beat.

    Of the well-known schedules and of one that always takes what is ready, backward first. `split`: backward in B and W; kept is a
    microbatch until its last gradient. One chunk a rank. None: no limit.
    """
    one_f_one_b(p, m)  # refuses sizes that cannot be
    split = yes_or_no(split, "split")
    limit = m if in_flight is None else whole(in_flight, "in_flight (microbatches kept on a rank)", 1, MOST["microbatches"])
    times = {"forward": forward, "backward": backward, "weight": weight, "hop": hop}
    tries = [zero_bubble_h1(p, m)] if split else [one_f_one_b(p, m), gpipe(p, m)]
    tries += [greedy(p, m, min(limit, k), split, **times) for k in {limit, p, 2 * p - 1} if k <= limit]
    found = [schedule for schedule in (timed(orders, **times) for orders in tries) if max(schedule.peak_kept) <= limit]
    return min(found, key=lambda schedule: (schedule.makespan, sum(schedule.peak_kept)))
