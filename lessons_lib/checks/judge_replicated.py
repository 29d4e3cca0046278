"""What is the same on ranks and what is not (lesson 04): drop, norm_of_copies."""

from __future__ import annotations

import itertools

import numpy as np

from .structure import calls, expect_bytes, expect_calls, said
from .trial import Case, Trial, draw, fresh, shown
from .values import expect_close, number, numbers, tensor

# ---- drop -------------------------------------------------------------------------------------------------------------


def judge_drop(trial: Trial) -> str:
    x, (seed, other) = draw(20, 20, smallest=1), (fresh() % 10**6 for _ in range(2))
    first = _masks(trial, [x] * 2, 0.5, seed, True)[0]
    if np.array_equal(first, _masks(trial, [x] * 2, 0.5, other, True)[0]):
        raise trial.wrong(2, "Two different seeds give the same mask: is `seed` used?")
    if not np.array_equal(first, _masks(trial, [x] * 2, 0.5, seed, True)[0]):
        raise trial.wrong(2, "Called again with the same seed, it gives another mask: draw from a generator with this seed alone.")
    for ranks, p in ((2, 0.5), (3, 0.75), (4, 0.5)):
        replicated = _masks(trial, [x] * ranks, p, seed, True)
        sharded = _masks(trial, [draw(20, 20, smallest=1) for _ in range(ranks)], p, seed, False)
        trial.passed(ranks)
    again = np.array_equal(sharded[0], replicated[0])
    return (
        f"Replicated: the same mask on all {ranks} ranks, from one seed and no message. Sharded: {ranks} masks, no two the same. "
        "Replicas that drop other places drift apart, and nothing complains."
        + (" Yet rank 0's own mask is the replicated one of the same seed: seed + 1 + rank keeps the two apart." if again else "")
    )


def _masks(trial: Trial, xs: list, p: float, seed: int, alike: bool) -> list[np.ndarray]:
    """Which numbers stayed, on each rank; Wrong unless they are alike, or all different."""
    case = trial.run([(x, p, seed, alike) for x in xs])
    masks = [_mask(case, rank, p) for rank in case.active]
    _expect_masks(case, masks, alike)
    expect_calls(case, [], "Nothing needs to be sent: who has the same seed draws the same numbers.")
    return masks


def _mask(case: Case, rank: int, p: float) -> np.ndarray:
    """Which numbers stayed; Wrong if others came than 0 and x / (1 - p)."""
    x = case.array(rank)
    got = tensor(case, rank, case.value(rank), x)
    kept = got != 0
    right = x / (1 - p)
    if not np.array_equal(got[kept], right[kept]):
        first = np.flatnonzero((kept & (got != right)).reshape(-1))[0]
        inverted = np.array_equal(got[kept], (x / p)[kept].astype(got.dtype))
        why = (
            "That divides by p: divide by the part that stays, 1 - p."
            if inverted
            else "What stays is to be multiplied by 1 / (1 - p), so that the mean stays."
        )
        raise case.wrong(
            f"Rank {rank}: what stays of {numbers(x.reshape(-1)[first:])} should be {numbers(right.reshape(-1)[first:])}; it is "
            f"{numbers(got.reshape(-1)[first:])}.",
            why,
        )
    dropped = 1 - kept.mean()
    if abs(dropped - p) > 0.2:
        raise case.wrong(
            f"Rank {rank}: with p = {p:g}, {dropped:.0%} of the numbers were dropped.",
            "p is the part that is dropped, not the part that stays." if abs(dropped - (1 - p)) < 0.2 else "",
        )
    return kept


def _expect_masks(case: Case, masks: list, alike: bool) -> None:
    for one, other in itertools.combinations(range(case.ranks), 2):
        if alike and not np.array_equal(masks[one], masks[other]):
            raise case.wrong(
                f"alike=True: ranks {one} and {other} dropped other places.",
                "They hold the same x, and now no longer do: replicas drift apart. All must draw the same.",
            )
        if not alike and np.array_equal(masks[one], masks[other]):
            raise case.wrong(
                f"alike=False: ranks {one} and {other} dropped the same places.",
                "They hold other parts of one tensor, whose mask now repeats. Each must draw its own.",
            )


# ---- norm_of_copies ---------------------------------------------------------------------------------------------------

_CLOSE = 1e-5


def judge_norm_of_copies(trial: Trial) -> str:
    known = 0.0
    for ranks, sizes, copies in (
        (4, (1, 1), (1, 4)),
        (3, (7,), (3,)),
        (2, (5, 3, 4), (1, 2, 2)),
        (6, (4, 2, 3), (1, 2, 6)),
        (5, (2, 3), (1, 5)),
        (1, (3, 2), (1, 1)),
    ):
        given = _gradients(ranks, sizes, copies)
        case = trial.run([(gradients, list(copies)) for gradients in given])
        squares = np.array([[float(np.sum(one.array().astype(float) ** 2)) for one in mine] for mine in given])
        right = float(np.sqrt((squares / copies).sum()))
        for rank in range(ranks):
            got = number(case.value(rank))
            if got is None:
                missing = " Is the `return` missing?" if case.value(rank) is None else ""
                raise case.wrong(
                    f"Rank {rank}: your function returned {shown(case.value(rank))}, and should return a number.{missing}"
                )
            if not expect_close(got, right, _CLOSE):
                raise case.wrong(
                    f"Rank {rank} should return {right:.4g}; it returned {got:.4g}.",
                    _explain_norm(rank, got, squares, np.array(copies)),
                )
        expect_bytes(case, 2 * (ranks - 1) / ranks * 8, lambda rank, case=case: _why_so_many(case, rank))
        trial.passed(ranks)
        if not known:
            known, wrong = right, float(np.sqrt(squares.sum()))
    return (
        f"A 2 of its own on each of 4 ranks, and one 2 that all have: the norm is {known:.3f}, and {wrong:.3f} if copies count as "
        "often as they are held. One number was summed."
    )


def _gradients(ranks: int, sizes, copies) -> list[list]:
    """Tensors of each rank: of every tensor `copies` consecutive ranks hold the same one."""
    twos = {"largest": 2, "smallest": 2} if sizes == (1, 1) else {}
    drawn = [[draw(size, **twos) for _ in range(ranks // k)] for size, k in zip(sizes, copies)]
    return [[some[rank // k] for some, k in zip(drawn, copies)] for rank in range(ranks)]


def _explain_norm(rank: int, got: float, squares: np.ndarray, copies: np.ndarray) -> str:
    n = len(squares)
    once = np.where(copies > 1, squares / n, squares)
    added = "The norms of the tensors are added: squares add up, norms do not. Take the root once, at the end."
    for value, text in (
        (np.sqrt(squares.sum()), "Everything is summed over all ranks: what several hold counts as often as they are."),
        ((squares / copies).sum(), "That is the square of the norm: the root is missing."),
        (np.sqrt(squares[rank].sum()), "That is the norm of what this rank holds: the parts of the others are missing."),
        (np.sqrt((squares[rank] / copies).sum()), "The copies are counted right, and the sum over ranks is missing."),
        (np.sqrt(squares.sum(axis=1)).sum(), "The norms of the ranks are added: squares add up, norms do not."),
        (np.sqrt((squares / copies).sum(axis=1)).sum(), "The norms of the ranks are added: squares add up, norms do not."),
        ((np.sqrt(squares) / copies).sum(), added),
        (np.sqrt(squares).sum(), added),
        (np.sqrt(squares / copies).sum(), added),
        (
            np.sqrt((squares / copies**2).sum()),
            "The gradients are divided by their copies before they are squared: divide the squares.",
        ),
        (np.sqrt(once.sum()), f"Copies are taken for replicas on all {n} ranks; some are held by fewer."),
        (
            np.sqrt(squares[:, copies == 1].sum() + squares[rank, copies > 1].sum()),
            "Of the copies, only those of this rank are in it.",
        ),
        (np.sqrt(squares[:, copies == 1].sum()), "Only what a single rank holds is in it: the copies are missing."),
        (np.sqrt((squares / copies).sum() / n), f"It is divided by {n}: a mean over ranks."),
    ):
        if expect_close(got, float(value), _CLOSE):
            return text
    return ""


def _why_so_many(case: Case, rank: int) -> str:
    made = calls(case.recording, rank)
    if len(made) > 1:
        return f"{said(made)}: add up on the rank first, then one number needs to be summed."
    return "One number needs to be summed, not the gradients."
