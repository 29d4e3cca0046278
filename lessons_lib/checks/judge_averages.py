"""What an average over samples must show (lesson 03): average_by_count, average_in_one_call, average_over_microbatches."""

from __future__ import annotations

import numpy as np

from .gradients import expect_gradients, one_process, same
from .inside import Net
from .nets import Assorted, MeanSquare
from .structure import bytes_sent, calls, count, expect_bytes, expect_own_code, said
from .trial import Case, Trial, draw, fresh
from .values import expect

_CLOSE = 1e-5  # of the largest number: float32 and a division
_SLACK = 32  # bytes, for counts beside the gradients


def _ring(n: int) -> float:
    """What an all-reduce of one byte makes each rank send."""
    return 2 * (n - 1) / n


def _average_mistakes(rank: int, own: list, samples: list[int]) -> list[tuple[np.ndarray, str]]:
    """(what comes out, the mistake) for an average of own[q] over ranks q of so many samples each."""
    n, total = len(own), sum(samples)
    weighted = sum(c * g for c, g in zip(samples, own))
    return [
        (own[rank], "This is the rank's own gradient: nothing was combined with it."),
        (
            sum(own) / n,
            f"This is the mean of the {n} ranks' means: a rank with few samples counts as much as one with many. Weight each by "
            f"its "
            "number of samples.",
        ),
        (sum(own), "This is the sum of the ranks' means: neither weighted nor divided."),
        (weighted, "Each gradient is weighted by its samples, but the sum is not divided by the number of all samples."),
        (weighted / n, f"The weighted sum is divided by {n}, the number of ranks: divide by the number of all samples."),
        (weighted / max(samples[rank], 1), "The weighted sum is divided by this rank's own samples, not by everybody's."),
        (
            weighted / max(n * samples[rank], 1),
            "The weighted sum is divided as if every rank had as many samples as this one: the ranks must tell each other.",
        ),
        (samples[rank] / total * own[rank], "The weight is right, but the sum over ranks is missing."),
    ]


# ---- average_by_count -------------------------------------------------------------------------------------------------

_KNOWN = ((72, 4), (85, 4), (96, 4), (288, 1))  # their mean is 100, the mean of means 135.25


def judge_average_by_count(trial: Trial) -> str:
    line = ""
    for samples in ((5, 3), (1, 9, 3), (4, 4, 4, 1), (2, 1, 7, 3, 6), (3,)):
        ranks = len(samples)
        starts = [(first,) for first, _ in _KNOWN] if ranks == 4 else [()] * ranks
        case = trial.run([(draw(7, start=start), c) for start, c in zip(starts, samples)])
        own = [case.array(rank).astype(float) for rank in range(ranks)]
        mean = (sum(c * g for c, g in zip(samples, own)) / sum(samples)).astype("float32")

        def explain(rank, got, own=own, samples=samples):
            found = (text for array, text in _average_mistakes(rank, own, samples) if same(got, array, _CLOSE))
            return next(found, "")

        expect(case, [mean] * ranks, explain, tolerance=_CLOSE)
        most = 2 * (mean.nbytes + 16) if ranks > 1 else 0  # a reduce and a broadcast are welcome, too
        expect_bytes(case, most, lambda rank, case=case, g=mean.nbytes: _why_so_many(case, rank, g))
        trial.passed(ranks)
        if ranks == 4:
            wrong = sum(first for first, _ in _KNOWN) / 4
            made = calls(case.recording, 0)
            more = "" if len(made) < 2 else " One call is enough, if the count travels with the numbers: that is exercise 3."
            line = (
                f"Batches of 4, 4, 4 and 1 whose means begin with 72, 85, 96 and 288: the mean over samples is "
                f"{float(mean[0]):g}, a "
                f"mean of means would be {wrong:g}. You made {count(len(made), 'call')}.{more}"
            )
    return line


def _why_so_many(case: Case, rank: int, nbytes: int) -> str:
    made = calls(case.recording, rank)
    gathered = [size for op, size in made if op == "all_gather"]
    if any(size >= case.ranks * nbytes for size in gathered):
        return "Gathered, everybody has everybody's gradient, and only the sum was needed."
    if len(gathered) > 1 and sum(size for op, size in made if op == "all_reduce") < 2 * nbytes:
        return (
            "The gradient went round once. The counts travelled as objects, each with its pickle, after a call that tells its "
            "size: a tensor is sent as it is."
        )
    return "The gradient needs to go round once."


# ---- average_in_one_call ----------------------------------------------------------------------------------------------

_NAMES = ("table.weight", "middle.weight", "middle.bias", "norm.weight")


def judge_average_in_one_call(trial: Trial) -> str:
    for samples, without in (
        ((3, 5), ((), ())),
        ((4, 1, 2), ((), (), ())),
        ((5, 1, 2, 8), ((), ("middle.bias",), (), ("norm.weight", "middle.bias"))),
        ((6, 0, 1), ((), _NAMES, ("middle.weight",))),
        ((7,), ((),)),
    ):
        ranks, weights = len(samples), fresh()
        inputs = [(Net(Assorted, weights, gradients=fresh(), without=missing), c) for missing, c in zip(without, samples)]
        case = trial.run(inputs)
        own = [net.state().gradients for net, _ in inputs]
        filled = [{name: np.zeros_like(net.state().values[name]) if g is None else g for name, g in one.items()}
                  for (net, _), one in zip(inputs, own)]  # fmt: skip
        mean = {name: sum(c * one[name] for c, one in zip(samples, filled)) / sum(samples) for name in _NAMES}
        expect_gradients(
            case,
            0,
            [{**mean, "norm.bias": None}] * ranks,
            lambda rank, name, own=own, filled=filled, samples=samples: (
                _had_none(own[rank][name]) + _average_mistakes(rank, [one[name] for one in filled], samples)
            ),
            tolerance=_CLOSE,
        )
        nbytes = sum(array.nbytes for array in mean.values())
        _expect_one_call(case, nbytes)
        trial.passed(ranks)
        if ranks == 4:
            sent = calls(case.recording, 0)[0][1]
    return (
        f"{len(_NAMES)} parameters of {nbytes} bytes and the count in 1 all-reduce of {sent} bytes: the latency is paid once, and "
        "ranks of 5, 1, 2 and 8 samples count by their samples."
    )


def _had_none(gradient: np.ndarray | None) -> list[tuple[np.ndarray, str]]:
    text = "This rank had no gradient for it: it counts as zeros, and gets the mean like all others, or replicas drift apart."
    return [] if gradient is not None else [(np.zeros(shape), text) for shape in ((7, 4), (4, 4), (4,))]


def _expect_one_call(case: Case, nbytes: int) -> None:
    expect_own_code(case)
    for rank in case.active:
        made = calls(case.recording, rank)
        if len(made) == 1 and made[0][0] == "all_reduce" and nbytes < made[0][1] <= nbytes + 16:
            continue
        if len(made) > len(_NAMES):
            why = "Every call pays the latency: lay all gradients into one buffer first."
        elif len(made) == 2:
            why = "What is the second one for? A count is a number, too: it has room at the end of the buffer."
        elif len(made) == 1 and made[0][0] == "all_reduce":
            why = f"The gradients that train take {nbytes} bytes, and the count needs one number more."
        else:
            why = ""
        raise case.wrong(
            f"The numbers are right, the way is not: rank {rank} called {said(made) if made else 'nothing'}; one all_reduce of "
            f"{nbytes + 4} bytes is enough.",
            why,
        )


# ---- average_over_microbatches ----------------------------------------------------------------------------------------


def judge_average_over_microbatches(trial: Trial) -> str:
    for sizes in (((2, 2), (2, 2)), ((3, 1), (2, 2), (1, 4)), ((4,), (1,)), ((2, 1, 3), (1, 1), (5,)), ((1, 2),)):
        ranks, net, total = len(sizes), Net(MeanSquare, fresh()), sum(map(sum, sizes))
        inputs = [(net, [draw(size, 4, largest=9) for size in mine], total) for mine in sizes]
        case = trial.run(inputs)
        parts = [[one_process(net, one.array())[1] for one in microbatches] for _, microbatches, _ in inputs]
        whole = one_process(net, np.concatenate([one.array() for _, microbatches, _ in inputs for one in microbatches]))[1]
        expect_gradients(
            case,
            0,
            [whole] * ranks,
            lambda rank, name, parts=parts, sizes=sizes: _microbatch_mistakes(
                rank, [[part[name].astype(float) for part in mine] for mine in parts], sizes
            ),
            tolerance=_CLOSE,
        )
        _expect_one_at_a_time(case)
        nbytes = sum(array.nbytes for array in whole.values())
        most = max(map(len, sizes))
        expect_bytes(
            case, _ring(ranks) * (nbytes + _SLACK), lambda rank, case=case, m=most, g=nbytes: _sent_often(case, rank, m, g)
        )
        trial.passed(ranks)
        if ranks == 3 and most == 2:
            sent, micro = bytes_sent(case.recording, 0), sum(map(len, sizes))
    return (
        f"{micro} microbatches on 3 ranks, {nbytes} bytes of gradients: each rank sent {sent:.0f} bytes, as it would for a single "
        "microbatch. Accumulation is free on the link."
    )


def _expect_one_at_a_time(case: Case) -> None:
    """Every microbatch's backward ran before the next one's forward; else Wrong says how many were in memory."""
    for rank in case.active:
        notes = case.state(rank).notes
        there, most = set(), 0
        for kind, number in notes:
            there = there | {number} if kind == "F" else there - {number}
            # what never goes backward (a loss that is only looked at) is gone by then
            most = max(most, sum(("B", one) in notes for one in there))
        if most > 1:
            raise case.wrong(
                f"The gradients are right, the way is not: rank {rank} had {most} microbatches in memory at the same time.",
                "A forward keeps what its backward needs, and microbatches are there so that only one is kept: run backward after "
                "each forward.",
            )


def _microbatch_mistakes(rank: int, parts: list, sizes) -> list[tuple[np.ndarray, str]]:
    """parts[q][j]: the gradient of the mean loss of microbatch j of rank q."""
    n, total = len(parts), sum(map(sum, sizes))
    scaled = [[c / total * g for c, g in zip(mine, part)] for mine, part in zip(sizes, parts)]
    own = [sum(mine) for mine in scaled]
    found = [
        (own[rank], "This is the rank's own microbatches alone: the sum over ranks is missing."),
        (
            sum(sum(part) for part in parts) / n,
            "The losses of the microbatches are added, and each of them is a mean already: scale each by its samples before "
            "backward.",
        ),
        (sum(sum(part) for part in parts), "Every microbatch's gradient counts in full: nothing is divided."),
        (
            sum(sum(part) / len(part) for part in parts) / n,
            "This is a mean of means: every microbatch counts as much as any other, however many samples it holds.",
        ),
        (
            sum(sum(c * g for c, g in zip(mine, part)) / sum(mine) for mine, part in zip(sizes, parts)) / n,
            "Within a rank the samples are weighted; between ranks it is a mean of means.",
        ),
        (sum(mine[-1] for mine in scaled), "Only the last microbatch is in it: is the gradient set to zero in between?"),
    ]
    if len({len(mine) for mine in sizes}) == 1 and len(sizes[0]) > 1:
        reduced, averaged, late = 0.0, 0.0, 0.0
        for j in range(len(sizes[0])):
            step = sum(mine[j] for mine in scaled)
            late = reduced + scaled[rank][j]
            reduced = n * reduced + step
            averaged = averaged + step / n
        found += [
            (
                reduced,
                "The gradient was summed over ranks after each microbatch, and with it what had been summed before: all that came "
                f"earlier counts {n} times over. A hook that all-reduces p.grad does that.",
            ),
            (averaged, f"This is 1/{n} of the right one: the losses are divided by all samples already, so ranks are summed."),
            (late, "The sum over ranks was made before the last microbatch's backward, so the ranks drift apart."),
        ]
    return found


def _sent_often(case: Case, rank: int, most: int, nbytes: int) -> str:
    made = calls(case.recording, rank)
    if made and sum(size for _, size in made) >= 2 * nbytes:
        often = sum(size for _, size in made) / nbytes
        return f"The gradients went round {often:.0f} times: synchronise once, after the last backward."
    return "Only the sum of the gradients is needed, once."
