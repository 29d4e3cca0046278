"""What a step with sharded states must show (lesson 03): momentum_of_a_shard."""

from __future__ import annotations

import numpy as np

from .gradients import same
from .structure import bytes_sent, calls, expect_bytes
from .trial import Case, Trial, draw, shown
from .values import difference, tensor, unlike, who

MOMENTUM, RATE = 0.5, 0.25
_CLOSE = 1e-5
_SLACK = 16  # bytes, for the norm


def judge_sharded_step(trial: Trial) -> str:
    line = ""
    for ranks, length, largest in (
        (2, 10, 1e9),
        (2, 8, 20.0),
        (4, 22, 50.0),
        (3, 31, 30.0),
        (5, 3, 10.0),
        (4, 64, 1e9),
        (1, 6, 9.0),
    ):
        rows = -(-length // ranks)
        weights = draw(length)
        case = trial.run([(weights, draw(length), draw(rows), largest) for _ in range(ranks)], may_change=(0, 1, 2))
        right = _steps(case, rows, largest)
        _expect(case, right, rows, largest)
        nbytes = 4 * rows * ranks
        expect_bytes(
            case, 2 * (ranks - 1) / ranks * (nbytes + _SLACK), lambda rank, case=case, g=nbytes: _why_so_many(case, rank, g)
        )
        trial.passed(ranks)
        if ranks == 4 and length == 22:
            names = list(dict.fromkeys(op for op, _ in calls(case.recording, 0)))
            line = (
                f"{length} weights on 4 ranks, {rows} of momentum on each: {', '.join(names)} sent "
                f"{bytes_sent(case.recording, 0):.0f} bytes, and an all-reduce of {nbytes} bytes alone sends {1.5 * nbytes:.0f}. "
                "The states are a quarter, for the same bytes and one number more."
            )
    return line


def _padded(x: np.ndarray, size: int) -> np.ndarray:
    return np.concatenate([x.astype(float), np.zeros(size - len(x))])


def _step(weights, gradient, momentum, length, largest, norm=None, before=False, grow=False, rate=RATE):
    """(new weights, new momentum), whole and padded; options are mistakes."""
    norm = np.linalg.norm(gradient) if norm is None else norm
    scale = largest / norm if grow or norm > largest else 1.0
    new = (MOMENTUM * momentum + gradient) * scale if before else MOMENTUM * momentum + scale * gradient
    return weights - rate * new, new


def _steps(case: Case, rows: int, largest: float, of=None, **options):
    """What one process does: (weights, momentum) of all ranks together. `of`: the gradient, by default the mean over ranks."""
    ranks, length = case.ranks, len(case.array(0))
    weights = _padded(case.array(0), rows * ranks)
    own = [_padded(case.array(rank, 1), rows * ranks) for rank in range(ranks)]
    momentum = np.concatenate([case.array(rank, 2) for rank in range(ranks)]).astype(float)
    momentum[length:] = 0  # the padding belongs to nobody
    return _step(weights, np.mean(own, axis=0) if of is None else of(own), momentum, length, largest, **options)


def _expect(case: Case, right, rows: int, largest: float) -> None:
    length = len(case.array(0))
    weights, momentum = (part.astype("float32") for part in right)
    found, problem = {}, ""
    for rank in case.active:
        value = case.value(rank)
        if not isinstance(value, (tuple, list)) or len(value) != 2:
            raise case.wrong(
                f"Rank {rank}: your function returned {shown(value)}, and should return two tensors: the new weights, all of them, "
                "and the new momentum of this rank's piece."
            )
        whole = tensor(case, rank, value[0], weights[:length], "as weights ", _about_padding(rows * case.ranks))
        mine = tensor(case, rank, value[1], momentum[rank * rows : (rank + 1) * rows], "as momentum ", _about_whole(length, rows))
        found[rank] = (whole, mine)
    for which, place in (("momentum", 1), ("weights", 0)):
        bad = []
        for rank in case.active:
            real = max(0, min(rows, length - rank * rows))  # of this rank's momentum, the rest is padding
            want = momentum[rank * rows :][:real] if place else weights[:length]
            if unlike(found[rank][place][: len(want)], want, _CLOSE).any():
                bad.append((rank, want))
        if bad:
            rank, want = bad[0]
            got = found[rank][place][: len(want)]
            problem = difference(rank, want, got, _CLOSE).replace("should return", f"should return the {which}")
            raise case.wrong(
                problem, who(case.active, [rank for rank, _ in bad]), _explain(case, rank, place, got, rows, largest, len(want))
            )


def _about_padding(padded: int):
    return lambda rank, array: "Those include the padding: cut it off." if len(array) == padded else ""


def _about_whole(length: int, rows: int):
    def explain(rank, array):
        if len(array) >= length > rows:
            return "That is the momentum of all weights: each rank keeps its own piece alone, which is the point."
        return ""

    return explain


def _explain(case: Case, rank: int, place: int, got, rows: int, largest: float, size: int) -> str:
    ranks, length = case.ranks, len(case.array(0))
    parts = [
        np.mean([_padded(case.array(q, 1), rows * ranks) for q in range(ranks)], axis=0)[q * rows : (q + 1) * rows]
        for q in range(ranks)
    ]
    own_norm = float(np.linalg.norm(_padded(case.array(rank, 1), rows * ranks)))
    norms = [float(np.linalg.norm(part)) for part in parts]
    whole = float(np.linalg.norm(np.concatenate(parts)))
    tries = (
        ({"of": sum}, "That is a step with the sum of the gradients: the mean over ranks was asked for."),
        (
            {"of": sum, "norm": ranks * whole, "largest": ranks * largest},
            "That is a step with the sum of the gradients, not their mean.",
        ),
        ({"of": lambda own: own[rank]}, "That is a step with this rank's own gradient: it was never averaged."),
        ({"norm": norms[rank]}, "It is clipped by the norm of this rank's piece alone: the norm of the whole needs all pieces."),
        ({"norm": sum(norms)}, "It is clipped by the sum of the pieces' norms: squares add up, norms do not."),
        ({"norm": whole**2}, "It is clipped by the square of the norm: the root is missing."),
        ({"norm": own_norm}, "It is clipped by the norm of this rank's gradient before averaging."),
        ({"norm": 0.0}, "Nothing was clipped: the norm of the averaged gradient is above `largest`."),
        ({"grow": True}, "The gradient was scaled up: a norm below `largest` stays as it is."),
        ({"before": True}, "The momentum was clipped, too: clip the gradient before it is added to the momentum."),
    )
    for options, text in tries:
        step = _steps(case, rows, options.pop("largest", largest), **options)
        if place and same(got, step[1][rank * rows :][:size], _CLOSE) or not place and same(got, step[0][:length], _CLOSE):
            return text
    if not place:
        before = _padded(case.array(0), rows * ranks)[:length]
        fresh_part = slice(rank * rows, rank * rows + rows)
        mask = np.ones(length, bool)
        mask[fresh_part] = False
        if same(got[mask], before[mask].astype(got.dtype), _CLOSE) and mask.any():
            return "The rank's own piece is new, the others are old: nothing was gathered from the other ranks."
        if same(got, before.astype(got.dtype), _CLOSE):
            return "These are the weights from before the step."
        if same(got, _steps(case, rows, largest, rate=1.0)[0][:length], _CLOSE):
            return "The rate is missing."
        if same(got, _steps(case, rows, largest, rate=-RATE)[0][:length], _CLOSE):
            return "The step goes uphill: subtract it."
    return ""


def _why_so_many(case: Case, rank: int, nbytes: int) -> str:
    large = [op for op, size in calls(case.recording, rank) if size >= nbytes - 16]
    if "all_reduce" in large:
        return (
            "An all-reduce is a reduce-scatter and an all-gather: you pay for a second all-gather, of gradients that nobody needs."
        )
    if large.count("all_gather") > 1:
        return "Momentum is no one else's business: gather the new weights alone."
    return "One reduce-scatter of the gradients and one all-gather of the weights are enough, and one number for the norm."
