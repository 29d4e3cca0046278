"""What an answer about the stages themselves must show (lesson 05): sum_tied, balance."""

from __future__ import annotations

import math
import random

import numpy as np
import torch

from ..parallel.schedules import timed
from ..recording import COLLECTIVE
from .exercise import Wrong
from .gradients import expect_gradients
from .inside import Net
from .judge_schedules import one_f_one_b_of
from .nets_stages import End, Middle
from .structure import calls, count, expect_own_code, said, sends, traffic
from .trial import Case, Trial, fresh, shown
from .values import number

# ---- sum_tied ---------------------------------------------------------------------------------------------------------

_VOCABULARY, _WIDTH = 6, 4


def judge_sum_tied(trial: Trial) -> str:
    for ranks in (4, 2, 3, 5, 1):
        start = fresh()  # both copies of the table begin alike
        ends = {0, ranks - 1}
        inputs = [
            (Net(End, start, (_VOCABULARY, _WIDTH), gradients=fresh()),) if rank in ends
            else (Net(Middle, fresh(), (_WIDTH,), gradients=fresh()),)
            for rank in range(ranks)
        ]  # fmt: skip
        case = _run_tied(trial, inputs)
        own = [net.state().gradients for (net,) in inputs]
        _expect_weights_kept(case)
        first, last = own[0]["table"], own[-1]["table"]
        expected = [dict(one) for one in own]
        for rank in ends if ranks > 1 else ():
            expected[rank]["table"] = first + last
        expect_gradients(
            case,
            0,
            expected,
            lambda rank, name, own=own, case=case: _tied_mistakes(case, rank, name, own),
        )
        _expect_ends_alone(case, first.nbytes)
        trial.passed(ranks)
        if ranks == 5:
            nbytes = first.nbytes
    return (
        f"Both copies of the table hold the sum of two gradients of {nbytes} bytes, so they stay equal. Ranks 1 to 3 of 5 sent "
        "nothing; with one rank there is nothing to sum."
    )


def _run_tied(trial: Trial, inputs: list) -> Case:
    try:
        return trial.run(inputs, may_change=(0,))
    except Wrong as error:
        if len(inputs) > 1 or "duplicate" not in str(error):
            raise
        raise Wrong(f"{error}\nWith one rank the first and the last are the same: there is nobody to sum with.") from None


def _tied_mistakes(case: Case, rank: int, name: str, own: list) -> list[tuple[np.ndarray, str]]:
    mine = own[rank][name]
    if name != "table":
        return [
            (own[0][name] + own[-1][name], f"{name} is not tied: every stage has its own, and its gradient stays its own."),
            (sum(one[name] for one in own), f"{name} is not tied: every stage has its own, and its gradient stays its own."),
        ]
    first, last = own[0][name], own[-1][name]
    if case.ranks == 1:
        return [(2 * mine, "One rank holds both ends: there is one table, and its gradient is the sum already.")]
    return [
        (mine, _told_of_ends(case, first, last)),
        ((first + last) / 2, "This is the mean. A weight that is used twice gets the sum of both gradients, as in one process."),
        (first + last + mine, "Its own gradient is counted twice."),
        (2 * (first + last), "The sum was made twice."),
        (last if rank == 0 else first, "This is the other end's gradient: it replaced its own, instead of being added."),
    ]


def _told_of_ends(case: Case, first: np.ndarray, last: np.ndarray) -> str:
    """What happened, if one end still has its own gradient alone."""
    got = [case.state(rank).gradients["table"] for rank in (0, case.ranks - 1)]
    kept = [array is not None and np.array_equal(array, own) for array, own in zip(got, (first, last))]
    if all(kept):
        return "Both ends still have their own gradient alone: the two copies drift apart, for each takes another step."
    other = got[kept.index(False)]
    if other is not None and np.array_equal(other, first + last):
        return "The other end has the sum, this one still its own gradient: the sum must reach both."
    return "It still has its own gradient, and the other end has got it, too: it replaced the other one, instead of being added."


def _expect_weights_kept(case: Case) -> None:
    for rank in case.active:
        before, after = case.inputs[rank][0].state().values, case.state(rank).values
        changed = [name for name in before if not np.array_equal(before[name], after.get(name))]
        if changed:
            raise case.wrong(
                f"Rank {rank}: your function changed the weight {changed[0]}.",
                "The weights are equal already; it is their gradients that differ, stage.table.grad.",
            )


def _expect_ends_alone(case: Case, nbytes: int) -> None:
    """Only the first and the last rank take part, with one gradient's bytes each."""
    expect_own_code(case)
    recording, ranks = case.recording, case.ranks
    for rank in [*range(1, ranks - 1), 0, ranks - 1]:
        made, sent = calls(recording, rank), sends(recording, rank)
        if rank not in (0, ranks - 1) or ranks == 1:
            if made or sent:
                told = said(made) if made else f"sent {traffic(sent)}"
                raise case.wrong(
                    f"The gradients are right, the way is not: rank {rank} {'called ' if made else ''}{told}.",
                    "With one rank there is nobody to talk to." if ranks == 1 else
                    "It has no copy of the table. Who has one? A group of these two can sum among themselves.",
                )  # fmt: skip
            continue
        total = sum(size for _, size in sent) + _bytes_in_groups(recording, rank)
        if total > nbytes:
            raise case.wrong(
                f"The gradients are right, the way is not: rank {rank} sent {total:,.0f} bytes; {nbytes} are enough. It "
                f"{'called ' + said(made) if made else 'sent ' + traffic(sent)}.",
                "The gradient of the table is all that needs to travel, once." if total > 1.5 * nbytes else "",
            )


_SHARE = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0}  # x (n-1)/n x bytes, in a ring of n


def _bytes_in_groups(recording, rank: int) -> float:
    total = 0.0
    for event in recording.events[rank]:
        if event["kind"] == COLLECTIVE:
            n = len(recording.groups[event["group"]])
            total += _SHARE.get(recording.ops[event["op"]], n / max(n - 1, 1)) * (n - 1) / n * int(event["nbytes"])
    return total


# ---- balance ----------------------------------------------------------------------------------------------------------

_BLOCKS, _EMBEDDING, _BLOCK, _HEAD, _STAGES = 12, 1, 4, 10, 4
_MICRO = 8


def judge_balance(trial: Trial) -> str:
    rng = random.Random()
    inputs = [([5, 3, 4], 1), ([2, 9, 4], 3), ([9, 1, 1, 1, 1, 1], 3)]
    for p in (2, 3, 4, 5, 6):
        layers = rng.randint(2 * p + 1, 24)
        inputs.append(([rng.randint(1, 30) for _ in range(layers)], p))
    inputs.append(([_EMBEDDING, *[_BLOCK] * _BLOCKS, _HEAD], _STAGES))
    values = [_counts(value, *given) for value, given in zip(trial.values(inputs), inputs)]
    for (costs, p), counts in zip(inputs, values):
        best, slowest = least_slowest(costs, p), max(_stages(costs, counts))
        if slowest > best:
            raise Wrong(
                f"balance({_list(costs)}, {p}) returned {_list(counts)}: the stages cost {_list(_stages(costs, counts))}, so every "
                f"microbatch takes {slowest} on the slowest; {best} is possible.\n{_explain_balance(inputs, values)}".strip()
            )
    (costs, p), counts = inputs[-1], values[-1]
    even = [len(part) for part in np.array_split(costs, p)]
    steps = [_step(_stages(costs, cut)) for cut in (even, counts)]
    return (
        f"{len(costs)} layers, {_BLOCKS} blocks of cost {_BLOCK} with an embedding of {_EMBEDDING} and logits of {_HEAD}: as "
        f"{_list(even)} layers a stage a step of {_MICRO} microbatches takes {steps[0]}, as your {_list(counts)} it takes "
        f"{steps[1]} (1F1B, backward twice a forward; predicted). The pipeline goes at the pace of its slowest stage."
    )


def _step(stages: list):
    orders = [one_f_one_b_of(rank, len(stages), _MICRO) for rank in range(len(stages))]
    return timed(orders, forward=stages, backward=[2 * one for one in stages]).makespan


def least_slowest(costs: list, p: int):
    """The least cost of the slowest of p stages of consecutive layers, each with at least one: by dynamic programming."""
    sums = np.concatenate([[0], np.cumsum(costs)])
    best = list(sums[1:])  # of one stage for the first n + 1 layers
    for stage in range(2, p + 1):
        best = [
            min((max(best[cut - 1], sums[n] - sums[cut]) for cut in range(stage - 1, n)), default=math.inf)
            for n in range(1, len(costs) + 1)
        ]
    return int(best[-1])


def _stages(costs: list, counts: list) -> list:
    ends = np.cumsum(counts)
    return [sum(costs[end - n : end]) for end, n in zip(ends, counts)]


def _counts(value, costs: list, p: int) -> list[int]:
    call = f"balance({_list(costs)}, {p})"
    if isinstance(value, (np.ndarray, torch.Tensor)) and value.ndim == 1:
        value = value.tolist()
    if not isinstance(value, (list, tuple)):
        missing = " Is the `return` missing?" if value is None else ""
        raise Wrong(f"{call} returned {shown(value)}, and should return a list: how many layers each stage has.{missing}")
    if len(value) != p:
        raise Wrong(f"{call} returned {count(len(value), 'number')}, and there {'is 1 stage' if p == 1 else f'are {p} stages'}.")
    counts = []
    for stage, one in enumerate(value):
        n = None if isinstance(one, (list, tuple, range)) else number(one)
        if n is None or n != n or n in (math.inf, -math.inf) or n != int(n):
            raise Wrong(
                f"{call} returned {shown(one)} for stage {stage}, and should return how many layers it has: a whole number."
            )
        if n < 1:
            raise Wrong(f"{call} gives stage {stage} {int(n)} layers: here every stage has at least one.")
        counts.append(int(n))
    if sum(counts) != len(costs):
        why = ""
        if counts[-1] == len(costs) and counts == sorted(set(counts)):
            why = " These are the ends of the stages: asked is how many layers each has."
        elif sum(counts) == sum(costs):
            why = " These are the costs of the stages: asked is how many layers each has."
        elif sum(counts) < len(costs):
            why = f" {count(len(costs) - sum(counts), 'layer')} would be on no stage."
        raise Wrong(f"{call} returned {_list(counts)}: {sum(counts):,} layers in all, and there are {len(costs)}.{why}")
    return counts


def _explain_balance(inputs, values) -> str:
    for cut, text in (
        (_even, "That is the same number of layers for each: it is their costs that count."),
        (_filled, "That fills each stage up to the mean, and the last one gets what is left over."),
        (_stopped, "That stops before each stage gets above the mean, and the last one gets what is left over."),
    ):
        if all(cut(*given) == counts for given, counts in zip(inputs, values)):
            return text
    return "Say that no stage may cost more than some limit: how many stages do you need then?"


def _even(costs: list, p: int) -> list[int]:
    return [len(part) for part in np.array_split(costs, p)]


def _filled(costs: list, p: int) -> list[int]:
    return _by_mean(costs, p, lambda total, cost, mean: total >= mean)


def _stopped(costs: list, p: int) -> list[int]:
    return _by_mean(costs, p, lambda total, cost, mean: total + cost > mean)


def _by_mean(costs: list, p: int, full) -> list[int]:
    mean, counts, total = sum(costs) / p, [0], 0
    for n, cost in enumerate(costs):
        left, stages = len(costs) - n, p - len(counts)
        if counts[-1] and stages and (full(total, cost, mean) or left <= stages):
            counts.append(0)
            total = 0
        counts[-1] += 1
        total += cost
    return counts


def _list(values: list) -> str:
    words = [str(one) for one in values]
    return f"[{', '.join(words[:26])}{', ...' if len(words) > 26 else ''}]"
