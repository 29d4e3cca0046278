"""What a loss over a cut vocabulary must show (lesson 04): split_cross_entropy."""

from __future__ import annotations

import numpy as np
import torch.nn.functional as F

from .gradients import differentiated, expect_gradients, same
from .structure import bytes_sent, calls, expect_bytes
from .trial import Case, Trial, draw
from .values import expect

IGNORED = -100
_CLOSE = 1e-4
_SLACK = 64


def judge_split_cross_entropy(trial: Trial) -> str:
    for ranks, tokens, vocabulary, largest in ((2, 6, 8, 3), (3, 5, 10, 4), (4, 7, 14, 10_000), (5, 12, 61, 3), (1, 4, 5, 3)):
        sizes = [len(part) for part in np.array_split(np.arange(vocabulary), ranks)]
        starts = [int(first) for first in np.cumsum([0, *sizes[:-1]])]
        # the first token of all is no target, one of the last rank's is the second
        targets = draw(tokens, dtype="int64", smallest=0, largest=vocabulary - 1, start=(IGNORED, vocabulary - 1, 0))
        given = [(draw(tokens, size, largest=largest, requires_grad=True), targets, first) for size, first in zip(sizes, starts)]
        upstream = draw(smallest=2, largest=5)
        case = trial.run(given, upstream=[upstream] * ranks)
        logits = np.concatenate([case.array(rank) for rank in range(ranks)], axis=1)
        value, (gradient, _) = differentiated(F.cross_entropy, logits, targets.array(), upstream=upstream.array())
        expect(case, [value] * ranks, lambda rank, got, case=case, x=logits: _explain(case, rank, got, x), tolerance=_CLOSE)
        cuts = np.cumsum(sizes)[:-1]
        expect_gradients(
            case,
            0,
            np.split(gradient, cuts, axis=1),
            lambda rank, name, case=case, x=logits, g=gradient, cuts=cuts, u=upstream: _gradient_mistakes(
                case, rank, x, g, cuts, u
            ),
            tolerance=_CLOSE,
        )
        share = 2 * (ranks - 1) / ranks
        expect_bytes(case, share * (3 * 4 * tokens + _SLACK), lambda rank, case=case: _why_so_many(case, rank))
        trial.passed(ranks)
        if ranks == 5:
            sent = bytes_sent(case.recording, 0)
            a_token = sent / (share * 4 * tokens)
            gathered = (ranks - 1) / ranks * 4 * tokens * vocabulary
            line = (
                f"{tokens} tokens and {vocabulary} words on 5 ranks: each sent {sent:.0f} bytes to combine {a_token:.2g} numbers a "
                f"token, whatever the vocabulary; gathering the logits sends {gathered:,.0f}. Logits of 10,000 did not overflow."
            )
    return line


def _losses(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Per token, in float64; 0 where there is no target."""
    x = logits.astype(float)
    x = x - x.max(axis=1, keepdims=True)
    hit = np.take_along_axis(x, np.maximum(targets, 0)[:, None], axis=1)[:, 0]
    return np.where(targets >= 0, np.log(np.exp(x).sum(axis=1)) - hit, 0.0)


def _log_sums(x: np.ndarray) -> np.ndarray:
    """Per token, the logarithm of the sum of exponentials."""
    largest = x.max(axis=1)
    return np.log(np.exp(x - largest[:, None]).sum(axis=1)) + largest


_OWN_LARGEST = (
    "Every rank subtracted its own largest logit: exponentials of different ranks can only be added after the same number was "
    "subtracted."
)


def _own_largest(case: Case, x: np.ndarray, targets: np.ndarray, rank: int) -> list[np.ndarray]:
    """Losses if every rank subtracts its own largest logit from its own: from all, or not from the target's."""
    cuts = np.cumsum([case.array(q).shape[1] for q in range(case.ranks)])
    parts = np.split(x, cuts[:-1], axis=1)
    added = np.log(sum(np.exp(part - part.max(1, keepdims=True)).sum(1) for part in parts))
    word = np.maximum(targets, 0)
    hit = np.take_along_axis(x, word[:, None], axis=1)[:, 0]
    largest = np.stack([part.max(1) for part in parts])
    holder = np.searchsorted(cuts, word, side="right")
    return [added - (hit - largest[holder, np.arange(len(word))]), added + largest[rank] - hit]


def _explain(case: Case, rank: int, got: np.ndarray, logits: np.ndarray) -> str:
    targets, first = case.array(rank, 1), case.inputs[rank][2]
    if np.isneginf(got).all():
        return (
            "All exponentials of some token are 0, and the logarithm of 0 is -inf: was one number subtracted from all tokens? Each "
            "token has a largest logit of its own."
        )
    if not np.isfinite(got).all():
        return (
            "exp() of a large logit overflows: subtract the largest of all ranks from all logits first, which changes no "
            "probability."
        )
    losses, counted = _losses(logits, targets), targets >= 0
    own = case.array(rank)
    inside = (targets >= first) & (targets < first + own.shape[1])
    alone = _losses(own, np.where(inside, targets - first, -1))
    x = logits.astype(float)
    zeroed = np.where(counted, _log_sums(x), 0.0)
    there = np.where(inside, np.take_along_axis(x, np.maximum(targets, 0)[:, None], axis=1)[:, 0], 0.0)
    as_zero = np.where(counted, losses, _losses(logits, np.zeros_like(targets)))
    # a token that does not count, taken in: no rank has its target, so nothing is taken off its sum's logarithm
    taken_in = [np.where(counted, losses, _log_sums(x) - largest) for largest in (x.max(1), x.max(), 0.0)]
    ignored = f"Tokens whose target is {IGNORED} are in the mean: they have no loss that counts."
    tries = (
        (losses.sum() / len(losses), f"The sum is divided by all {len(losses)} tokens: those with target {IGNORED} do not count."),
        (losses.sum(), "This is the sum over tokens: the mean was asked for."),
        (as_zero.mean(), f"A target of {IGNORED} was taken for a word: it says that the token does not count."),
        *((total / n, ignored) for one in taken_in for total in [one.sum()] for n in (len(one), counted.sum())),
        *((one[counted].mean(), _OWN_LARGEST) for one in _own_largest(case, x, targets, rank)),
        (
            (zeroed - there)[counted].mean(),
            "The logit of the target is there on the rank that holds it alone: the others need it, too.",
        ),
        (zeroed[counted].mean(), "The logit of the target is missing."),
        (
            alone[inside].mean() if inside.any() else np.nan,
            "This is the softmax over this rank's words alone, for its own targets.",
        ),
        (alone.sum() / counted.sum(), "This is the softmax over this rank's words alone, for its own targets."),
    )
    return next((text for wrong, text in tries if np.isfinite(wrong) and same(got, np.asarray(wrong), _CLOSE)), "")


def _gradient_mistakes(case: Case, rank: int, logits, right, cuts, upstream):
    targets = case.array(rank, 1)
    counted = targets >= 0
    factor = float(upstream.array()) / counted.sum()
    x = np.exp(logits.astype(float) - logits.max(axis=1, keepdims=True))
    softmax = np.where(counted[:, None], x / x.sum(axis=1, keepdims=True), 0.0) * factor
    mine = np.split(right, cuts, axis=1)[rank]
    part = np.split(x, cuts, axis=1)[rank]
    with np.errstate(all="ignore"):
        local = np.nan_to_num(np.where(counted[:, None], part / part.sum(axis=1, keepdims=True), 0.0)) * factor
    hit = np.split(softmax - right, cuts, axis=1)[rank]
    yield mine / float(upstream.array()), "backward does not use the gradient that comes from above: it is not always 1."
    yield mine * counted.sum(), "This is the gradient of the sum over tokens, not of the mean."
    yield mine * counted.sum() / len(targets), f"It is divided by all tokens: those with target {IGNORED} do not count."
    yield mine + hit, "The softmax is right; the one that is taken off at the target is missing."
    yield local - hit, "This is the softmax over this rank's words alone: its sum must be that of all ranks."
    yield -hit, "The part of the softmax is missing: was the sum of exponentials cut off from the graph?"


def _why_so_many(case: Case, rank: int) -> str:
    made = [op for op, _ in calls(case.recording, rank)]
    if "all_gather" in made:
        return "The logits are the largest tensor of the model: a token needs three numbers, not its whole row."
    if calls(case.recording, rank, "backward"):
        return "Backward needs no call: each rank knows the sum of exponentials from forward."
    return "A token needs three numbers: the largest logit, the sum of exponentials, the logit of the target."
