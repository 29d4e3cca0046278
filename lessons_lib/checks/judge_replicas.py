"""What a common start must show (lesson 03): adopt_best."""

from __future__ import annotations

import numpy as np

from .gradients import expect_values, same
from .inside import Net
from .nets import Kept
from .structure import bytes_sent, calls, expect_bytes
from .trial import Case, Trial, fresh

_SLACK = 512  # bytes, for the losses


def judge_adopt_best(trial: Trial) -> str:
    line = ""
    for losses in ((2.5, 0.75, 3.0), (0.5, 0.25), (-1.0, -3.5, 0.0, 2.0), (1.5, 0.5, 0.5, 4.0, 2.0), (1.0,)):
        ranks, best = len(losses), int(np.argmin(losses))
        case = trial.run([(Net(Kept, fresh()), loss) for loss in losses], may_change=(0,))
        before = [case.inputs[rank][0].state().values for rank in range(ranks)]
        expect_values(
            case,
            0,
            [before[best]] * ranks,
            lambda rank, name, case=case, before=before, losses=losses: _mistakes(case, rank, name, before, losses),
        )
        nbytes = sum(array.nbytes for array in before[0].values())
        expect_bytes(case, nbytes + _SLACK, lambda rank, case=case, g=nbytes: _why_so_many(case, rank, g))
        trial.passed(ranks)
        if ranks == 5:
            line = (
                f"Rank {best} of 5 had the lowest loss: its {len(before[0])} tensors, {nbytes:,} bytes, parameters and buffers, "
                f"trained and frozen, are on all ranks; each sent at most {bytes_sent(case.recording, best):,.0f}."
            )
    return line


def _mistakes(case: Case, rank: int, name: str, before: list, losses):
    n, worst, best = len(before), int(np.argmax(losses)), int(np.argmin(losses))
    last = n - 1 - int(np.argmin(losses[::-1]))
    if rank != best and "running" in name or "num_batches" in name:
        yield before[rank][name], "This is what the rank had: buffers belong to the model, too, and are not among its parameters."
    if rank != best and name.startswith("frozen"):
        yield before[rank][name], "This is what the rank had: a frozen parameter does not train, and still computes."
    if last != best:
        yield before[last][name], f"These are rank {last}'s. Ranks {best} and {last} have the same loss: the lower rank counts."
    if best != 0 and all(same(case.state(q).values.get(name, np.empty(0)), before[0][name]) for q in range(n)):
        yield before[0][name], f"All ranks have rank 0's now; rank {best} has the lowest loss."
    yield before[rank][name], "This is what the rank had before: nothing was received into the model's own tensors."
    yield before[worst][name], f"These are rank {worst}'s, whose loss is the highest."
    yield np.mean([one[name] for one in before], axis=0), "This is the mean of all models: nobody ever had that one, or its loss."
    for q, one in enumerate(before):
        yield one[name], f"These are rank {q}'s; rank {best} has the lowest loss."


def _why_so_many(case: Case, rank: int, nbytes: int) -> str:
    made = calls(case.recording, rank)
    if sum(size for op, size in made if op == "all_gather") >= case.ranks * nbytes:
        return "Gathered, everybody has every model, and one was wanted. Gather the losses alone."
    if sum(size for op, size in made if op == "all_reduce") >= nbytes:
        return "An all-reduce sends twice what a broadcast does."
    if any(op == "broadcast" and size > nbytes for op, size in made):
        return (
            "More than the model's numbers went in one broadcast: an object is sent with its pickle, which holds names and types, "
            "too. Send the tensors."
        )
    return "The best model needs to go round once."
