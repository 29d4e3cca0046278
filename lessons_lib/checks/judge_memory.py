"""What schedules under a memory limit must show (lesson 05): within_memory."""

from __future__ import annotations

import math
import random

import numpy as np
import torch

from ..hardware import Cluster, Device, Link
from ..parallel.schedules import Action, ScheduleError, check_orders, needs, par, recognise, timed
from ..ranks import run
from ..replay import replay
from .exercise import Wrong
from .inside import Net
from .judge_schedules import waits_for_nothing
from .rows import read_orders, reason
from .table_runner import FORWARD_FLOPS, SAMPLES, WIDTH, layer, mean_loss, run_orders
from .trial import Trial, draw, fresh

_RUN = (3, 4, 2, True)  # the case that real ranks run
CASES = (  # ranks, microbatches, in flight, whether backward is split
    (1, 3, 1, False), (2, 3, 1, False), (3, 4, 3, False), (3, 6, 2, False), (4, 8, 4, False), (3, 7, 3, True), (4, 8, 8, True),
    (5, 4, 4, True), (2, 2, 2, True), (3, 4, 1, True), (4, 8, 3, True), (4, 5, 3, True), (3, 3, 2, True), _RUN,
)  # fmt: skip


def judge_within_memory(trial: Trial) -> str:
    rng = random.Random()
    inputs = list(CASES)
    for split in (False, True, True):
        m = rng.randint(2, 8)
        inputs.append((rng.randint(2, 5), m, rng.randint(1, m), split))
    schedules = [_expect_schedule(value, *given) for given, value in zip(inputs, _values(trial, inputs))]
    pars = [known(*given).makespan for given in inputs]
    for given, schedule, most in zip(inputs, schedules, pars):
        if schedule.makespan > most:
            raise Wrong(
                f"{call(*given)} can run and keeps to the limit, in {schedule.makespan} slots; par is {most}.\n"
                f"{_explain_slow(schedule, *given)}\n{_picture(schedule)}"
            )
    table = schedules[CASES.index(_RUN)]
    ran = _ran(table)
    # not those that are drawn: the line is always the same
    mine, theirs = sum(schedule.makespan for schedule in schedules[: len(CASES)]), sum(pars[: len(CASES)])
    better = f"{theirs - mine} better" if mine < theirs else "reached; it can be beaten"
    return (
        f"All {len(inputs)} sizes: the {len(CASES)} that are always asked take {mine} slots; par {theirs}: {better}. The one for "
        f"{call(*_RUN)} ran on 3 real ranks: gradients as in one process, {ran:g} slots (replayed), {table.makespan} in the table."
    )


def _values(trial: Trial, inputs: list) -> list:
    try:
        return trial.values(inputs)
    except Wrong as error:
        if "did not finish" not in str(error):
            raise
        raise Wrong(
            f"{error}\nIf none of your loops is endless: there are {len(inputs)} sizes, and a search over all orders is too slow "
            "for them. Let time run slot by slot instead."
        ) from None


def known(p, m, in_flight, split):
    """Par: the library's, or, if that is shorter, what takes F first while no more are between F and B than under 1F1B."""
    found = [par(p, m, in_flight, split, **times(split)), timed(_forwards_first(p, m, in_flight, split), **times(split))]
    return min(found, key=lambda schedule: schedule.makespan)


def _forwards_first(p, m, in_flight, split) -> list[list[Action]]:
    orders, busy = [[] for _ in range(p)], [0] * p
    ends = [{} for _ in range(p)]  # of each rank: when an action is through
    kinds, slot = "FBW" if split else "FB", 0
    while any(len(order) < m * len(kinds) for order in orders):
        for rank, order in enumerate(orders):
            through = [one.kind for one, end in ends[rank].items() if end <= slot]
            for kind in kinds if busy[rank] <= slot else "":
                one = Action(kind, sum(other.kind == kind for other in order))
                if one.microbatch == m or any(ends[r].get(need, math.inf) > slot for r, need in needs(one, rank, p, 1)):
                    continue
                room = min(in_flight + through.count(kinds[-1]), p - rank + through.count("B"))
                if kind == "F" and one.microbatch >= room:
                    continue
                order.append(one)
                ends[rank][one] = busy[rank] = slot + (2 if kind == "B" and not split else 1)
                break
        slot += 1
    return orders


def times(split: bool) -> dict:
    """Slots: F takes 1, B 2; split, B and W take 1 each."""
    return {"forward": 1, "backward": 1 if split else 2, "weight": 1}


def call(p, m, in_flight, split) -> str:
    return f"within_memory({p}, {m}, {in_flight}, {split})"


def _expect_schedule(value, p, m, in_flight, split):
    """The answer's orders, timed; else Wrong: what cannot be read, or cannot run, or keeps too much."""
    name = call(p, m, in_flight, split)
    orders = read_orders(value, p, name)
    try:
        check_orders(orders, m, 1, split)
        schedule = timed(orders, **times(split))
    except ScheduleError as error:
        raise Wrong(f"The orders of {name} cannot run. {reason(error)}") from None
    kept = schedule.peak_kept
    rank = int(np.argmax(kept))
    if kept[rank] > in_flight:
        ends = schedule.peak_in_flight
        if split and max(ends) <= in_flight:
            why = f"Until B there are {ends[rank]}; but B leaves something for W, and a microbatch is kept until then."
        elif recognise(schedule) != "none that I know":
            why = f"That is {recognise(schedule)}, which heeds no limit. What must a rank do before it may take in another one?"
        else:
            why = f"Before F of the next one, {'W' if split else 'B'} of an earlier one must be through."
        raise Wrong(f"{name}: rank {rank} keeps {kept[rank]} microbatches at once, and {in_flight} may be kept.\n{why}")
    return schedule


def _explain_slow(schedule, p, m, in_flight, split) -> str:
    alone = timed([[one for i in range(m) for one in order if one.microbatch == i] for order in schedule.orders], **times(split))
    if schedule.makespan >= alone.makespan and in_flight > 1 and m > 1 and p > 1:
        return f"One microbatch after the other, as if only one could be kept: here it is {in_flight}."
    glued = all(order[n + 1].kind == "W" for order in schedule.orders for n, one in enumerate(order) if split and one.kind == "B")
    if split and glued and p > 1:
        return (
            "Every W follows its B at once, as if backward were not split. Nobody waits for W: it can fill a slot in which a rank "
            "waits."
        )
    if split and p > 1 and all(one.kind == "W" for order in schedule.orders for one in order[-m:]):
        return "Every W comes at the very end. It can fill a slot in which a rank waits, and it makes room for the next F."
    return waits_for_nothing(schedule, in_flight) or (
        "No rank waits while it could do something. So which of two things that it could do comes first? Somebody may wait for one."
    )


def _picture(schedule, width: int = 96) -> str:
    """The grid, as wide as a message may be before its lines are broken."""
    return "\n".join(line if len(line) <= width else f"{line[:width]} ..." for line in schedule.text.splitlines())


# ---- on real ranks ------------------------------------------------------------------------------------------------------

_SLOT = Cluster(
    Device(FORWARD_FLOPS, 1e30, 1e30, efficiency=1.0, name="a device on which F takes 1 s"),
    intra_node=Link(1e30, 0.0, "a link that takes no time"),
)


def _ran(schedule) -> float:
    """Run the table on real ranks; its makespan in slots, replayed. Wrong if its gradients are not those of one process."""
    p, m = schedule.ranks, schedule.microbatches
    nets = [Net(layer, fresh(), largest=2) for _ in range(p)]
    inputs, targets = draw(SAMPLES * m, WIDTH, largest=3), draw(SAMPLES * m, WIDTH, largest=3)
    recording = run(run_orders, schedule.orders, nets, inputs, targets, ranks=p, timeout=60)
    with torch.device("cpu"), torch.enable_grad():
        models = [net.make() for net in nets]
        loss = mean_loss(torch.nn.Sequential(*models)(inputs.make()), targets.make())
        loss.backward()
    for model, (_, gradient) in zip(models, recording.results):
        right = model.weight.grad.numpy()
        if np.abs(gradient - right).max() > 1e-4 * np.abs(right).max():
            raise Wrong("Run on real ranks, your schedule gives other gradients than one process.")
    return replay(recording, _SLOT).step_time
