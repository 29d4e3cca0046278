"""What a sequence-parallel layer must show (lesson 04): sequence_parallel_mlp."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from .gradients import differentiated, expect_gradients
from .structure import bytes_sent, calls, expect_bytes, said
from .trial import Case, Trial, draw, parts
from .values import expect, same

RANKS, TOKENS, WIDTH, HIDDEN = 4, 64, 32, 128
PAR_KEPT = 14_000  # bytes on each rank
_CLOSE = 1e-4
_SLACK = 64
_CALLS = 5  # gathers and scatters of x that are allowed: one each way forward, one each way backward, one more gather


def _layer(x, norm, up, down):
    return F.linear(torch.relu(F.linear(F.layer_norm(x, x.shape[-1:], norm), up)), down)


def judge_sequence_parallel_mlp(trial: Trial) -> str:
    for ranks, tokens, width, hidden in ((2, 8, 6, 16), (3, 6, 5, 12), (1, 3, 4, 2), (RANKS, TOKENS, WIDTH, HIDDEN)):
        x, norm = draw(tokens, width), draw(width, largest=9, requires_grad=True)
        up, down = draw(hidden, width, largest=3), draw(width, hidden, largest=3)
        upstream = draw(tokens, width, largest=3)
        whole = [one.array() for one in (x, norm, up, down)]
        value, right = differentiated(_layer, *whole, upstream=upstream.array())
        pieces = zip(parts(x, ranks), [norm] * ranks, parts(up, ranks), parts(down, ranks, axis=1))
        case = trial.run(list(pieces), upstream=parts(upstream, ranks))
        expect(
            case,
            np.split(value, ranks),
            lambda rank, got, case=case, a=whole, v=value: _explain(case, rank, got, a, v),
            True,
            _CLOSE,
        )
        for position, axis in ((3, 1), (2, 0), (0, 0), (1, None)):
            expected = [right[position]] * ranks if axis is None else np.split(right[position], ranks, axis=axis)
            expect_gradients(
                case,
                position,
                expected,
                lambda rank, name, e=expected, p=position, case=case, a=whole, u=upstream: _mistakes(
                    case, rank, p, e[rank], a, u.array()
                ),
                tolerance=_CLOSE,
            )
        _expect_no_all_reduce(case, 4 * width)
        ring = (ranks - 1) / ranks
        expect_bytes(
            case, ring * (_CALLS * value.nbytes + 2 * 4 * width + _SLACK), lambda rank, case=case: _why_so_many(case, rank)
        )
        trial.passed(ranks)
    return _par(case, value.nbytes)


def _par(case: Case, nbytes: int) -> str:
    kept = max(case.returned[rank].kept for rank in case.active)
    facts = (
        f"{TOKENS} tokens of {WIDTH} on {RANKS} ranks: backward needs {kept:,} bytes that forward keeps on each (counted), "
        f"{kept / nbytes:.2f} times x; par is {PAR_KEPT:,}"
    )
    if kept > PAR_KEPT:
        if kept >= 3 * nbytes:
            why = "Is what was made before an activation kept, too, or a copy of what is there already?"
        else:
            why = (
                f"What is gathered has {nbytes:,} bytes, and so much is kept for the gradient of `up`. Each rank holds its part "
                f"of it "
                "anyway, and backward could gather once more."
            )
        raise case.wrong(f"Values and gradients are right. {facts}.", why)
    return f"{facts}. Each rank sent {bytes_sent(case.recording, 0):,.0f} bytes with {said(calls(case.recording, 0))}."


def _explain(case: Case, rank: int, got: np.ndarray, arrays, value: np.ndarray) -> str:
    n = case.ranks
    rows = len(value) // n
    if got.shape == value.shape and n > 1:
        return "Those are all tokens: a rank returns its own part of the sequence, which a reduce-scatter leaves it with."
    if got.shape != (rows, value.shape[1]):
        return ""
    x, norm, _, _ = arrays
    mine = slice(rank * rows, rank * rows + rows)
    alone = _values(x[mine], norm, case.array(rank, 2), case.array(rank, 3))
    unnormed = np.maximum(x @ arrays[2].T, 0) @ arrays[3].T
    for wrong, text in (
        (alone, "Only this rank's part of the hidden numbers is in it, for its own tokens: nobody else's part was added."),
        (sum(_values(x[q * rows : q * rows + rows], norm, case.array(q, 2), case.array(q, 3)) for q in range(n)),
         "Different tokens were added to each other: before the products, all tokens are to be gathered on every rank."),
        (value[mine] / n, "It is divided by the number of ranks: the parts of a sum are added."),
        (unnormed[mine], "The norm is missing."),
        (value[:rows], "These are the tokens of rank 0."),
    ):  # fmt: skip
        if same(got, wrong.astype(got.dtype), _CLOSE):
            return text
    return ""


def _values(x, norm, up, down) -> np.ndarray:
    return differentiated(_layer, x, norm, up, down, upstream=np.zeros((len(x), down.shape[0]), x.dtype))[0]


def _mistakes(case: Case, rank: int, position: int, right: np.ndarray, arrays, upstream):
    n, (x, norm, _, _) = case.ranks, arrays
    up, down = case.array(rank, 2), case.array(rank, 3)
    rows = len(x) // n
    mine = slice(rank * rows, rank * rows + rows)
    if position == 1:
        whole = differentiated(_layer, *arrays, upstream=upstream)[1]
        hat = F.layer_norm(torch.from_numpy(x), (x.shape[1],)).numpy()
        inner = differentiated(lambda y, a, b: F.linear(torch.relu(F.linear(y, a)), b), hat * norm, *arrays[2:], upstream=upstream)[
            1
        ][0]
        yield (
            (inner * hat)[mine].sum(0),
            "This is what this rank's own tokens give. The norm's weight is a replica: its gradient is the sum over ranks, or "
            "replicas "
            "drift apart.",
        )
        yield n * whole[1], "It is summed twice over ranks."
        yield whole[1] / n, "It is divided by the number of ranks: the gradients of the tokens are added."
    if position == 0:
        part = differentiated(_layer, x, norm, up, down, upstream=upstream)[1][0]
        yield (
            part[mine],
            "Only this rank's hidden numbers are in it: what was gathered was used by all ranks, so its gradients add up.",
        )
    padded = np.zeros_like(upstream)
    padded[mine] = upstream[mine]
    own = differentiated(_layer, x, norm, up, down, upstream=padded)[1]
    if position in (2, 3):
        yield own[position], "Only this rank's tokens are in it: a reduce-scatter's backward gathers the gradients of all tokens."
    if position == 0:
        yield own[0][mine], "Only this rank's tokens and hidden numbers are in it: neither call has its backward."


def _expect_no_all_reduce(case: Case, most: int) -> None:
    for rank in case.active:
        large = [nbytes for op, nbytes in calls(case.recording, rank) if op == "all_reduce" and nbytes > most]
        if large:
            raise case.wrong(
                f"Values and gradients are right, the way is not: rank {rank} called all_reduce with {large[0]:,} bytes.",
                "An all-reduce is a reduce-scatter and an all-gather, and here only one of them is needed.",
            )


def _why_so_many(case: Case, rank: int) -> str:
    return f"{_CALLS} gathers and scatters of x are enough, and one small all-reduce."
