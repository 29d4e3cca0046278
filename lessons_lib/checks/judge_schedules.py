"""What an answer about one schedule must show (lesson 05): three_by_four, microbatches_needed, order_of_rank."""

from __future__ import annotations

import math
import random

from ..parallel.schedules import Action, ScheduleError, check_orders, check_schedule, needs, par, recognise, timed
from .exercise import Wrong
from .rows import read_order, read_table, reason
from .trial import Trial, shown
from .values import number

# ---- three_by_four ----------------------------------------------------------------------------------------------------

_RANKS, _MICROBATCHES = 3, 4


def judge_three_by_four(trial: Trial) -> str:
    table = read_table(trial.values([()])[0], _RANKS)
    try:
        schedule = check_schedule(table, _RANKS, _MICROBATCHES, chunks=1, split=False)
    except ScheduleError as error:
        raise Wrong(f"This schedule cannot run. {reason(error)}") from None
    enough = par(_RANKS, _MICROBATCHES).makespan
    if schedule.makespan > enough:
        # somebody does wait for nothing: every schedule of this size in which nobody does takes twelve slots
        raise Wrong(
            f"Your table can run, but in {schedule.makespan} slots; {enough} are enough.\n"
            f"{waits_for_nothing(schedule, _MICROBATCHES)}"
        )
    name, peaks = recognise(schedule), " ".join(map(str, schedule.peak_in_flight))
    other = {
        "GPipe": f"1F1B takes as long, and holds {' '.join(str(min(_MICROBATCHES, _RANKS - r)) for r in range(_RANKS))}.",
        "1F1B": f"GPipe takes as long, and holds {' '.join([str(_MICROBATCHES)] * _RANKS)}.",
    }.get(name, "No schedule of whole forwards and backwards is shorter.")
    return (
        f"Your schedule is {'one of your own' if name.startswith('none') else name}: {schedule.makespan} slots (par {enough}), "
        f"{schedule.bubble_overhead:.1%} over ideal, {schedule.idle_share:.1%} of the step idle; at most {peaks} microbatches in "
        f"flight. {other}"
    )


def waits_for_nothing(schedule, in_flight: int) -> str:
    """The first slot in which a rank waits although something could run that it runs later; "" if there is none."""
    ends = {(cell.rank, cell.action): cell.end for cell in schedule.cells}
    last, p = "W" if schedule.split else "B", schedule.ranks
    for slot in range(int(schedule.makespan)):
        for rank in range(p):
            row = [cell for cell in schedule.cells if cell.rank == rank]
            if any(cell.time <= slot < cell.end for cell in row):
                continue
            kept = sum(cell.kind == "F" and cell.time < slot for cell in row)
            kept -= sum(cell.kind == last and cell.end <= slot for cell in row)
            for kind in ("B", "F", "W") if schedule.split else ("B", "F"):
                later = sorted(cell.action for cell in row if cell.kind == kind and cell.time > slot)
                ready = [one for one in later if all(ends[need] <= slot for need in needs(one, rank, p, 1))]
                if ready and not (kind == "F" and kept >= in_flight):
                    limit = ", within the limit" if in_flight < schedule.microbatches else ""
                    return f"In slot {slot}, rank {rank} waits, although it could run {ready[0]} then{limit}."
    return ""


# ---- microbatches_needed ----------------------------------------------------------------------------------------------

_NEEDED_MISTAKES = (  # what gives exactly that number, and the belief behind it
    (
        lambda p, s: math.ceil((p - 1) / s),
        "That keeps the overhead over ideal, (p-1)/m, that small. Asked is the share of the step.",
    ),
    (lambda p, s: math.ceil(p * (1 - s) / s), "That counts p idle slots; the last rank waits for the p-1 before it."),
    (lambda p, s: math.floor((p - 1) * (1 - s) / s), "That is rounded down: with so few, more of the step is idle than allowed."),
    (lambda p, s: math.floor((p - 1) * (1 - s) / s) + 1, "Exactly as much as allowed is allowed: there one less is enough."),
    (lambda p, s: round((p - 1) * (1 - s) / s), "That is rounded to the nearest: below it, more of the step is idle than allowed."),
    (lambda p, s: math.ceil((p - 1) * s / (1 - s)), "That is upside down: the smaller the share, the more microbatches."),
    (lambda p, s: math.ceil((p - 1) / s) + p - 1, "That adds the p-1 slots, where solving (p-1)/(m+p-1) for m subtracts them."),
)


def _needed(p: int, most_idle: float) -> int:
    """The least m with (p-1)/(m+p-1) <= most_idle."""
    m = 1
    while (p - 1) / (m + p - 1) > most_idle:
        m += 1
    return m


def judge_microbatches_needed(trial: Trial) -> str:
    rng = random.Random()
    inputs = [(5, 0.25), (4, 0.5), (9, 0.5), (3, 0.28)]  # three have a whole m that is exactly enough, in floats too
    while len(inputs) < 12:
        p, share = rng.randint(2, 64), rng.randint(2, 40) / 100
        exact = (p - 1) * (1 - share) / share
        if exact > 1 and 0.01 < exact % 1 < 0.99:
            inputs.append((p, share))
    inputs += [(1, 0.1), (2, 0.9), (8, 0.1)]
    values = trial.values(inputs)
    got = [_whole(value, given) for value, given in zip(values, inputs)]
    bad = [n for n, (m, given) in enumerate(zip(got, inputs)) if m != _needed(*given)]
    if bad:
        (p, share), m = inputs[bad[0]], got[bad[0]]
        found = f"microbatches_needed({p}, {share}) should be {_needed(p, share)}; yours returns {m:,}."
        if m > 0:
            found += f" With m = {m:,}, {_idle(p, m):.2%} of the step is idle; {share:.0%} is allowed."
        raise Wrong("\n".join([found, _explain_needed(inputs, got, bad)]).strip())
    p, share = inputs[-1]
    m = got[-1]
    return (
        f"With p = {p}, m = {m} keeps {_idle(p, m):.1%} of the step idle, which is {(p - 1) / m:.1%} over ideal: two numbers "
        f"for one "
        f"bubble. With twice the ranks it takes m = {_needed(2 * p, share)} (predicted)."
    )


def _idle(p: int, m: int) -> float:
    return (p - 1) / (m + p - 1)


def _whole(value, given) -> int:
    got = number(value)
    call = "microbatches_needed({}, {})".format(*given)
    if got is None or not math.isfinite(got):
        missing = " Is the `return` missing?" if value is None else ""
        raise Wrong(f"{call} returned {shown(value)}, and should return a whole number.{missing}")
    if got != int(got):
        raise Wrong(f"{call} returned {got:.6g}: half a microbatch does not exist. Which whole number keeps the promise?")
    return int(got)


def _explain_needed(inputs, got, bad) -> str:
    told = [text for wrong, text in _NEEDED_MISTAKES if all(got[n] == max(1, wrong(*inputs[n])) for n in range(len(inputs)))]
    told += [text for wrong, text in _NEEDED_MISTAKES if all(got[n] == wrong(*inputs[n]) for n in range(len(inputs)))]
    if told:
        return told[0]
    if all(got[n] < 1 for n in bad):
        return "Without any microbatch nothing is trained: the least is 1."
    return "Your function returns the same number whatever it is given." if len(set(got)) == 1 else ""


# ---- order_of_rank ----------------------------------------------------------------------------------------------------


def one_f_one_b_of(rank: int, p: int, m: int) -> list[Action]:
    """1F1B of one rank, in other words than the library's: before B of microbatch i come the forwards up to i + p - 1 - rank."""
    order, forwards = [], 0
    for i in range(m):
        while forwards < min(m, i + p - rank):
            order.append(Action("F", forwards))
            forwards += 1
        order.append(Action("B", i))
    return order


def judge_order_of_rank(trial: Trial) -> str:
    rng = random.Random()
    sizes = [(4, 8), (3, 4), (2, 7), (5, 5), (4, 2), (1, 3), (6, 3), (rng.randint(3, 7), rng.randint(8, 20))]
    inputs = [(rank, p, m) for p, m in sizes for rank in range(p)]
    values = dict(zip(inputs, trial.values(inputs)))
    for p, m in sizes:
        calls = {rank: f"order_of_rank({rank}, {p}, {m})" for rank in range(p)}
        orders = [read_order(values[rank, p, m], calls[rank]) for rank in range(p)]
        if orders == [one_f_one_b_of(rank, p, m) for rank in range(p)]:
            continue
        rank = next(r for r in range(p) if orders[r] != one_f_one_b_of(r, p, m))
        raise Wrong("\n".join([f"{calls[rank]} returned {_words(orders[rank])}.", _explain_order(orders, p, m, rank)]))
    p, m = sizes[0]
    schedule = timed([one_f_one_b_of(rank, p, m) for rank in range(p)])
    peaks = " ".join(map(str, schedule.peak_in_flight))
    return (
        f"With p = {p}, m = {m} your orders take {schedule.makespan} slots, as GPipe does: {schedule.idle_share:.1%} of the "
        f"step idle. "
        f"At most {peaks} microbatches are in flight, where GPipe holds {m} on every rank."
    )


def _words(order: list[Action]) -> str:
    words = [str(one) for one in order]
    return f"{' '.join(words[:24]) or 'nothing'}{' ...' if len(words) > 24 else ''}"


def _lead(order: list[Action]) -> int:
    """Forwards before the first backward."""
    return next((n for n, one in enumerate(order) if one.kind == "B"), len(order))


def _explain_order(orders, p: int, m: int, rank: int) -> str:
    try:
        check_orders(orders, m, 1, split=False)
    except ScheduleError as error:
        return reason(error)
    lead, wanted = [_lead(order) for order in orders], [min(p - r, m) for r in range(p)]
    told = f"There {'is 1 forward' if lead[rank] == 1 else f'are {lead[rank]} forwards'} before its first backward"
    if all(one == m for one in lead) and lead != wanted:
        return (
            f"{told}, on every rank: that is GPipe, which holds all {m} microbatches. When can rank {rank} get its first gradient?"
        )
    if len(set(lead)) == 1 and lead != wanted:
        return f"{told}, on every rank alike. The later a stage, the earlier its first gradient comes back."
    if p > 1 and lead == wanted[::-1]:
        return f"{told}: that is counted from the wrong end. Rank 0 waits longest for its first gradient, the last rank not at all."
    if lead == [min(one + 1, m) for one in wanted]:
        return f"{told}: one more than it needs, so one more is in flight. In the steady state a forward comes first, too."
    if lead == [max(one - 1, 0) for one in wanted]:
        return f"{told}: one too few. The steady state is one forward, then one backward: in this order."
    backwards = [one.microbatch for one in orders[rank] if one.kind == "B"]
    if backwards != sorted(backwards):
        return "The first microbatch that went in is the first whose gradient comes back: backwards run in the same order."
    if lead == wanted:
        return "The warm-up is right. After it a forward and a backward take turns, as long as there are forwards."
    try:
        timed(orders)
    except ScheduleError as error:
        return reason(error)
    return f"{told}; with p = {p} and m = {m} it needs {wanted[rank]}."
