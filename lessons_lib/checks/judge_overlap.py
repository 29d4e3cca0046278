"""What communication hidden behind backward must show (lesson 03): overlapped_backward."""

from __future__ import annotations

import numpy as np

from ..formulas import ring_all_reduce
from ..hardware import H100, NVLINK4, Cluster
from ..recording import COLLECTIVE, WAIT, Recording
from ..replay import replay
from .exercise import Wrong
from .gradients import expect_gradients, one_process
from .inside import Net
from .nets import Stack, stack_and_batch
from .structure import calls, count, expect_bytes
from .trial import Trial, draw, fresh

WIDTH, DEPTH, SAMPLES, RANKS = 1024, 24, 1024, 8
CLUSTER = Cluster(H100, devices_per_node=RANKS, intra_node=NVLINK4)
PAR_STEP = 920e-6
_CLOSE = 1e-4
_SLACK = 64


def judge_overlapped_backward(trial: Trial) -> str:
    for ranks, width, depth, samples in ((2, 5, 3, 4), (3, 4, 5, 2), (4, 3, 2, 1), (1, 4, 2, 3)):
        net = Net(Stack, fresh(), (width, depth), largest=2)
        case = trial.run([(net, draw(samples, width, largest=5)) for _ in range(ranks)])
        own = [one_process(net, case.array(rank, 1))[1] for rank in range(ranks)]
        mean = {name: np.mean([one[name] for one in own], axis=0, dtype=float) for name in own[0]}
        expect_gradients(
            case,
            0,
            [mean] * ranks,
            lambda rank, name, mean=mean, n=ranks: [
                (n * mean[name], "This is the sum over ranks: the mean was asked for."),
                (mean[name] / n, f"It is divided by {n} twice."),
            ],
            own=own,
            tolerance=_CLOSE,
        )
        nbytes = sum(4 * array.size for array in mean.values())
        expect_bytes(case, 2 * (ranks - 1) / ranks * (nbytes + _SLACK))
        trial.passed(ranks)
    recording = trial.at_real_size(stack_and_batch, (WIDTH, DEPTH, SAMPLES), RANKS)
    line = _par(trial, recording)
    _expect_nothing_left(trial, recording)
    return line


def _par(trial: Trial, recording: Recording) -> str:
    timeline = replay(recording, CLUSTER)
    _, computing, exposed, _ = next(iter(timeline.breakdown()))
    made = calls(recording, 0)
    alone = replay_alone(made)
    facts = (
        f"{DEPTH} layers of {WIDTH:,} on {RANKS} H100s over NVLink 4: {1e6 * timeline.step_time:,.0f} us with "
        f"{count(len(made), 'all-reduce')} (replayed)"
    )
    if timeline.step_time <= PAR_STEP:
        return (
            f"{facts}; par {1e6 * PAR_STEP:,.0f} us. Of {1e6 * alone:,.0f} us of communication, {1e6 * exposed:,.0f} us are "
            "exposed: the rest hides behind backward."
        )
    raise trial.wrong(
        RANKS,
        f"The gradients are right. {facts}, of which {1e6 * exposed:,.0f} us are exposed communication; par is "
        f"{1e6 * PAR_STEP:,.0f} us.",
        _why_slow(recording, made, computing),
    )


def _expect_nothing_left(trial: Trial, first: Recording) -> None:
    """A second step with the same model sends what the first one sent: hooks that stay on a model go on working."""
    advice = "Hooks stay on a model until they are removed: hook = p.register_...(f), and hook.remove() when the step is done."
    try:
        both = trial.at_real_size(stack_and_batch, (WIDTH, DEPTH, SAMPLES), RANKS, steps=2)
    except Wrong as problem:
        why = str(problem).split(f"With {RANKS} ranks:\n")[-1]
        raise trial.wrong(RANKS, "The first step is right, a second step with the same model fails.", advice, why) from None
    once, twice = (sum(nbytes for _, nbytes in calls(recording, 0)) for recording in (first, both))
    if twice > 2 * once:
        raise trial.wrong(
            RANKS,
            f"The first step is right. A second step with the same model sends {twice - once:,} bytes of gradients, the first sent "
            f"{once:,}.",
            advice,
        )


def replay_alone(made) -> float:
    """Seconds that these collectives take one after the other (predicted)."""
    link = CLUSTER.intra_node
    return sum(ring_all_reduce(nbytes, RANKS, link.bandwidth, link.latency) for _, nbytes in made)


def _why_slow(recording: Recording, made, computing: float) -> str:
    events = recording.events[0]
    sent = np.flatnonzero(events["kind"] == COLLECTIVE)
    if (done := _work_before(recording, sent[0])) > 0.97:
        if len(made) == 1:
            return "No all-reduce starts before the last gradient is there: a single buffer cannot leave earlier."
        return (
            "No all-reduce starts before the last gradient is there. Are they called in backward, from hooks? And in which "
            "order do "
            "gradients arrive, if the last layer runs first?"
        )
    if events["blocking"][sent[:-1]].any():
        return "Every all-reduce is waited for where it is called, and backward with it. async_op=True returns a handle at once."
    waits = np.flatnonzero(events["kind"] == WAIT)
    if len(waits) and _work_before(recording, waits[0]) < 0.97:
        return "Backward is held up by a wait in the middle of it: wait when it has ended."
    if len(made) > 16:
        latency = 2 * (RANKS - 1) * CLUSTER.intra_node.latency
        return f"{len(made)} all-reduces pay {1e6 * latency:.0f} us of latency each: put several gradients into one."
    if made[-1][1] > 2 * sum(nbytes for _, nbytes in made) / len(made) or made[-1][1] > 10e6:
        return (
            f"The last all-reduce, {made[-1][1] / 1e6:.0f} MB, starts when backward has ended, and nothing is left to hide it "
            "behind: how large should the last one be?"
        )
    return f"The first one starts when {done:.0%} of the work is done. Larger ones pay less latency; smaller ones start earlier."


def _work_before(recording: Recording, event: int) -> float:
    """The part of rank 0's floating-point operations that its program does before this event."""
    events, costs = recording.events[0], recording.costs[0]
    each = np.array([operator.flops for operator in recording.operators], float)
    flops = each[costs["operator"]] * costs["count"]
    return float(flops[: events["last_cost"][:event].max(initial=0)].sum() / flops.sum())
