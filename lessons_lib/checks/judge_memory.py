"""What schedules under a memory limit must show (lesson 05): within_memory."""

from __future__ import annotations

import random

import numpy as np
import torch

from ..hardware import Cluster, Device, Link
from ..parallel.schedules import ScheduleError, check_orders, needs, par, recognise, timed
from ..ranks import run
from ..replay import replay
from .exercise import Wrong
from .inside import Net
from .rows import read_orders, reason
from .table_runner import FORWARD_FLOPS, SAMPLES, WIDTH, layer, mean_loss, run_orders
from .trial import Trial, draw, fresh

CASES = (  # ranks, microbatches, in flight, whether backward is split
    (1, 3, 1, False), (2, 3, 1, False), (3, 4, 3, False), (3, 6, 2, False), (4, 8, 4, False), (3, 7, 3, True), (4, 8, 8, True),
    (5, 4, 4, True), (2, 2, 2, True), (3, 4, 1, True), (4, 8, 3, True), (4, 5, 3, True), (3, 3, 2, True),
)  # fmt: skip
_RUN = (3, 4, 2, True)  # the case that real ranks run


def judge_within_memory(trial: Trial) -> str:
    rng = random.Random()
    inputs = [*CASES, _RUN]
    for split in (False, True, True):
        m = rng.randint(2, 8)
        inputs.append((rng.randint(2, 5), m, rng.randint(1, m), split))
    mine = theirs = 0
    for n, (given, value) in enumerate(zip(inputs, trial.values(inputs))):
        schedule, known = _expect_schedule(value, *given), par(*given, **times(given[3]))
        if schedule.makespan > known.makespan:
            raise Wrong(
                f"{call(*given)} can run and keeps to the limit, in {schedule.makespan} slots; par is {known.makespan}.\n"
                f"{_explain_slow(schedule, *given)}\n{_picture(schedule)}"
            )
        if n < len(CASES):  # not those that are drawn: the line is always the same
            mine, theirs = mine + schedule.makespan, theirs + known.makespan
        if n == len(CASES):
            ran, table = _ran(schedule), schedule
    better = f"{theirs - mine} better" if mine < theirs else "reached; it can be beaten"
    return (
        f"{len(CASES)} schedules take {mine} slots; par {theirs}: {better}. The one for {call(*_RUN)} ran on 3 real ranks: "
        f"gradients as in one process, {ran:g} slots (replayed), {table.makespan} in the table."
    )


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
    return _waits_for_nothing(schedule, in_flight) or (
        "No rank waits while it could do something. So which of two things that it could do comes first? Somebody may wait for one."
    )


def _waits_for_nothing(schedule, in_flight: int) -> str:
    """The first slot in which a rank waits although something could run that its order has later; "" if there is none."""
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
                later = [cell.action for cell in row if cell.kind == kind and cell.time > slot]
                full = kind == "F" and kept >= in_flight
                if later and not full and all(ends[need] <= slot for need in needs(min(later), rank, p, 1)):
                    return f"In slot {slot}, rank {rank} waits, although it could run {min(later)} then, within the limit."
    return ""


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
