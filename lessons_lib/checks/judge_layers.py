"""What layers that are cut over ranks must show (lesson 04): row_product, heads_of_rank, gated_mlp."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
import torch.nn.functional as F

from .gradients import differentiated, expect_gradients
from .structure import calls, count, expect_calls
from .trial import Case, Trial, draw
from .values import combination, expect, same


def _same(got: np.ndarray, other: np.ndarray) -> bool:
    return same(got, other, 1e-6)


# ---- row_product ------------------------------------------------------------------------------------------------------


def judge_row_product(trial: Trial) -> str:
    for ranks, tokens, inputs, outputs in ((2, 3, 6, 5), (3, 4, 7, 6), (4, 5, 8, 4), (5, 2, 9, 5), (1, 3, 4, 2)):
        sizes = [len(part) for part in np.array_split(np.arange(inputs), ranks)]
        weight, bias = (draw(*shape, largest=9, requires_grad=True) for shape in ((outputs, inputs), (outputs,)))
        given = [(draw(tokens, size, largest=9, requires_grad=True), weight, bias) for size in sizes]
        upstream = draw(tokens, outputs, largest=9)
        case = trial.run(given, upstream=[upstream] * ranks)
        x = np.concatenate([case.array(rank) for rank in range(ranks)], axis=1)
        value, (of_x, of_weight, of_bias) = differentiated(F.linear, x, weight.array(), bias.array(), upstream=upstream.array())
        expect(case, [value] * ranks, lambda rank, got, case=case: _explain_row(case, rank, got))
        cuts = np.cumsum([0, *sizes])
        parts = [slice(cuts[rank], cuts[rank + 1]) for rank in range(ranks)]
        of_own = [np.zeros_like(of_weight) for _ in parts]
        for own, part in zip(of_own, parts):
            own[:, part] = of_weight[:, part]
        expect_gradients(case, 2, [of_bias] * ranks, lambda rank, name, g=of_bias, n=ranks: _bias_mistakes(g, n))
        for position, right in ((0, [of_x[:, part] for part in parts]), (1, of_own)):
            expect_gradients(
                case,
                position,
                right,
                lambda rank, name, right=right, n=ranks: [
                    (n * right[rank], "The gradient was summed once more: backward through a sum passes it on as it is."),
                    (right[rank] / n, "Was something divided by the number of ranks?"),
                ],
            )
        expect_calls(case, [("all_reduce", value.nbytes)], "The output is the only thing that others need.", label="forward")
        expect_calls(case, [], "Every rank has the gradient of the output already: nothing needs to be sent.", label="backward")
        trial.passed(ranks)
        if ranks == 5:
            line = (
                f"9 inputs on 5 ranks, {', '.join(map(str, sizes))}: one all-reduce of {value.nbytes} bytes forward, none "
                f"backward; "
                "the bias counts once, forward and backward."
            )
    return line


def _explain_row(case: Case, rank: int, got: np.ndarray) -> str:
    n, weight, bias = case.ranks, case.array(rank, 1), case.array(rank, 2)
    cuts = np.cumsum([0, *(case.array(q).shape[1] for q in range(n))])
    parts = [case.array(q) @ weight[:, cuts[q] : cuts[q + 1]].T for q in range(n)]
    total = sum(parts)
    for array, text in (
        (total + n * bias, f"The bias is inside the sum: every rank added it, and it counts {n} times."),
        (total, "The bias is missing."),
        (parts[rank] + bias, "This is the rank's own part of the sum: the parts of the others are missing."),
        (parts[rank], "This is the rank's own part of the sum: the parts of the others and the bias are missing."),
        ((total + n * bias) / n, "This is the mean over ranks, not the sum."),
        (total / n + bias, "The sum is divided by the number of ranks."),
    ):
        if _same(got, array):
            return text
    return ""


def _bias_mistakes(gradient: np.ndarray, n: int) -> list[tuple[np.ndarray, str]]:
    return [
        (
            gradient / n,
            f"The values are right, this is 1/{n} of the gradient: the bias was divided to count once in the sum. Add it after.",
        ),
        (n * gradient, f"The gradient counts {n} times: every rank has all of it already, nothing needs to be summed."),
        (0 * gradient, "On this rank the bias has no part in the result. Only some rank added it: replicas would drift apart."),
    ]


# ---- heads_of_rank ----------------------------------------------------------------------------------------------------


def judge_heads_of_rank(trial: Trial) -> str:
    for ranks, heads, kv_heads, size in (
        (2, 4, 4, 3),
        (2, 4, 2, 2),
        (4, 8, 2, 2),
        (3, 6, 3, 3),
        (6, 12, 3, 1),
        (4, 4, 1, 2),
        (1, 4, 2, 2),
    ):
        qkv = draw((heads + 2 * kv_heads) * size, 5)
        case = trial.run([(qkv, heads, kv_heads, size) for _ in range(ranks)])
        rows = [_rows_of(rank, ranks, heads, kv_heads, size) for rank in range(ranks)]
        labels = _labels(heads, kv_heads, size)
        expect(
            case,
            [qkv.array()[mine] for mine in rows],
            lambda rank, got, q=qkv, rows=rows, labels=labels, n=ranks: _explain_heads(got, q.array(), rows[rank], labels, rank, n),
            any_shape=True,
        )
        expect_calls(case, [], "Every rank has all of qkv: nothing needs to be sent.")
        trial.passed(ranks)
        if ranks == 4 and kv_heads == 2:
            line = (
                f"8 query heads and 2 of keys and values on 4 ranks: {len(rows[0])} of {len(labels)} rows each, 1/4 of Q, and a "
                f"key and "
                "a value head that two ranks share. Their gradients will have to be summed over these two."
            )
    return line


def _rows_of(rank: int, ranks: int, heads: int, kv_heads: int, size: int) -> list[int]:
    """Rows of the fused matrix: this rank's query heads, then the key heads that they use, then the value heads."""
    mine = range(rank * heads // ranks, (rank + 1) * heads // ranks)
    used = sorted({head * kv_heads // heads for head in mine})
    starts = [head * size for head in mine] + [(heads + kv) * size for kv in used] + [(heads + kv_heads + kv) * size for kv in used]
    return [start + row for start in starts for row in range(size)]


def _labels(heads: int, kv_heads: int, size: int) -> list[str]:
    return [
        f"{kind}{head}" for kind, n in (("Q", heads), ("K", kv_heads), ("V", kv_heads)) for head in range(n) for _ in range(size)
    ]


def _explain_heads(got, qkv, rows: list[int], labels: list[str], rank: int, ranks: int) -> str:
    found = [next((i for i, row in enumerate(qkv) if np.array_equal(row, mine)), None) for mine in got] if got.ndim == 2 else []
    if not found or None in found:
        return ""
    have, want = (list(dict.fromkeys(labels[i] for i in some)) for some in (found, rows))
    text = f"It holds {', '.join(have)}; its heads are {', '.join(want)}."
    even = np.array_split(np.arange(len(labels)), ranks)[rank]
    if found == list(even) and found != rows:
        return f"{text} That is the fused matrix cut evenly, as if Q, K and V were one: cut each of them, then fuse."
    if have[: len(want)] == want and len(have) > len(want) or set(want) < set(have):
        return f"{text} Heads of keys and values that none of its queries uses are not needed."
    if set(have) == set(want) and len(found) < len(rows):
        return f"{text} Of some heads only a part of the {labels.count('K0')} rows is there: heads cannot be cut."
    if sorted(have) == sorted(want):
        return f"{text} The heads are right, in another order: all of Q, then K, then V."
    if [one for one in have if one[0] == "Q"] == [one for one in want if one[0] == "Q"]:
        return f"{text} The queries are right. Query head q uses key and value head q // (heads // kv_heads)."
    return text


# ---- gated_mlp --------------------------------------------------------------------------------------------------------


def _mlp(x, gate, up, down):
    return F.linear(torch.relu(F.linear(x, gate)) * F.linear(x, up), down)


_OTHERS = {
    "That is silu, as in Llama's gate; here relu was asked for.": lambda x, gate, up, down: F.linear(
        F.silu(F.linear(x, gate)) * F.linear(x, up), down
    ),
    "That is gelu; here relu was asked for.": lambda x, gate, up, down: F.linear(F.gelu(F.linear(x, gate)) * F.linear(x, up), down),
    "The activation is missing: relu belongs around gate x.": lambda x, gate, up, down: F.linear(
        F.linear(x, gate) * F.linear(x, up), down
    ),
    "gate and up have changed places: relu belongs around gate x.": lambda x, gate, up, down: _mlp(x, up, gate, down),
}  # what comes of another formula, over all ranks


def judge_gated_mlp(trial: Trial) -> str:
    for ranks, tokens, width, hidden in ((2, 5, 8, 8), (3, 4, 5, 8), (4, 3, 4, 10), (1, 2, 3, 4)):
        shapes = ((tokens, width), (hidden, width), (hidden, width), (width, hidden))
        given = [tuple(draw(*shape, largest=3, requires_grad=True) for shape in shapes)] * ranks
        upstream = draw(tokens, width, largest=3)
        case = trial.run(given, upstream=[upstream] * ranks)
        arrays = [one.array() for one in given[0]]
        value, right = differentiated(_mlp, *arrays, upstream=upstream.array())
        parts = np.array_split(np.arange(hidden), ranks)
        alone = [differentiated(_mlp, *_cut(arrays, part), upstream=upstream.array()) for part in parts]
        expect(case, [value] * ranks, lambda rank, got, a=arrays, alone=alone: _explain_mlp(rank, got, a, [v for v, _ in alone]))
        for position in (3, 1, 2):  # the weights first: their gradients need no call
            expect_gradients(
                case,
                position,
                [_own_part(right[position], part, position) for part in parts],
                _weight_mistakes(ranks, right[position], parts, position),
            )
        own = [gradients[0] for _, gradients in alone]
        expect_gradients(case, 0, [right[0]] * ranks, lambda rank, name, own=own, g=right[0], n=ranks: _of_x(own[rank], g, n))
        size = [("all_reduce", value.nbytes)]
        expect_calls(case, size, "By columns, then by rows: between the two nothing needs to be sent.", label="forward")
        expect_calls(case, size, _why_twice(case), label="backward")
        trial.passed(ranks)
        if ranks == 4:
            sent = count(2, "all-reduce")
            line = (
                f"{hidden} hidden numbers on 4 ranks, {', '.join(str(len(part)) for part in parts)}: {sent} of {value.nbytes} "
                f"bytes, one "
                "forward, one backward; the gate and the way up enter together."
            )
    return line


def _cut(arrays, part):
    x, gate, up, down = arrays
    return x, gate[part], up[part], down[:, part]


def _own_part(gradient: np.ndarray, part, position: int) -> np.ndarray:
    """The gradient of a whole weight of which a rank uses a part: zeros elsewhere."""
    own = np.zeros_like(gradient)
    at = (slice(None), part) if position == 3 else (part,)
    own[at] = gradient[at]
    return own


def _weight_mistakes(n: int, whole: np.ndarray, parts, position: int):
    def mistakes(rank: int, name: str) -> Iterable[tuple[np.ndarray, str]]:
        yield whole, "This rank uses all of the weight: each should only do its part of the hidden numbers."
        yield n * _own_part(whole, parts[rank], position), "The gradient of the sum was summed again: every rank has it already."

    return mistakes


def _of_x(own: np.ndarray, right: np.ndarray, n: int) -> list[tuple[np.ndarray, str]]:
    return [
        (
            own,
            "This is what this rank's part of the hidden numbers gives. Every rank uses x, so its gradient is the sum over ranks; "
            "autograd sees no other rank.",
        ),
        (n * right, "The gradient of the sum was summed again on its way back: every rank has it already."),
        (n * own, "The sum's gradient was summed again, and that of x not at all: the two functions have changed places."),
    ]


def _explain_mlp(rank: int, got, arrays, alone) -> str:
    x, gate, up, down = arrays
    if _same(got, alone[rank]):
        return "This is the rank's own part of the sum: the parts of the others are missing."
    if gate.shape[0] == gate.shape[1] and _same(got, np.maximum(x @ gate, 0) * (x @ up) @ down.T):
        return "The weights of gate and up are used as A in Y = XA; nn.Linear's weight is transposed: its rows make the outputs."
    if _same(got, sum(alone) / len(alone)):
        return "This is the mean over ranks: the parts of a sum are added."
    if _same(got, len(alone) * sum(alone)):
        return f"This is {len(alone)} times the right one: does every rank do all of it, before the sum?"
    for text, other in _OTHERS.items():
        if same(got, other(*map(torch.from_numpy, arrays)).numpy(), 1e-5):
            return text
    factors = combination(got, alone)
    return (
        ""
        if factors is None or factors.all()
        else f"The parts of rank {', '.join(map(str, np.flatnonzero(factors == 0)))} are missing."
    )


def _why_twice(case: Case) -> str:
    made = calls(case.recording, 0, "backward")
    if len(made) == 2:
        return "gate and up each enter on their own, and each entry sums a gradient: let x enter once, and use it twice."
    return "What is to be summed is the gradient of x, once."
