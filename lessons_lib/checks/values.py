"""Comparing what came with what was expected, and finding the mistake that gives exactly that. Plain numpy, whole numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from .trial import Case, shown

_SHOWN = 4  # numbers of a tensor shown, from the first that differs


def pieces(x: np.ndarray, n: int) -> list[np.ndarray]:
    """n consecutive pieces whose lengths differ by at most one, longer ones first: what tensor_split gives."""
    return np.array_split(x, n)


def expect(
    case: Case,
    expected: Sequence[np.ndarray | None],
    explain: Callable[[int, np.ndarray], str] | None = None,
    any_shape: bool = False,
    tolerance: float = 0.0,
) -> None:
    """Every rank that took part returned its expected[rank]; else Wrong.

    `explain(rank, got)` is a sentence about the mistake that gives exactly `got`, or "". With `any_shape` it is asked about tensors
    of a wrong shape, too. `tolerance`: see `unlike`.
    """
    about_shapes = explain if any_shape else None
    got = {rank: tensor(case, rank, case.value(rank), expected[rank], explain=about_shapes) for rank in case.active}
    wrong = [rank for rank in case.active if unlike(got[rank], expected[rank], tolerance).any()]
    if not wrong:
        return
    rank = wrong[0]
    why = (explain(rank, got[rank]) if explain else "") or _about_rounding(expected[rank], got[rank])
    if not why and wrong == case.active[1:]:
        why = "Does the result reach the others?"
    raise case.wrong(difference(rank, expected[rank], got[rank], tolerance), who(case.active, wrong), why)


def unlike(got: np.ndarray, expected: np.ndarray, tolerance: float = 0.0) -> np.ndarray:
    """Where two arrays of one shape differ: by more than `tolerance` times the largest expected number. 0: at all."""
    if not tolerance:
        return got != expected
    return ~(np.abs(got.astype(float) - expected) <= tolerance * np.abs(expected).max(initial=0))  # NaN differs


def tensor(case: Case, rank: int, value: Any, expected: np.ndarray, what: str = "", explain=None) -> np.ndarray:
    """`value`, which an answer returned, as an array of the expected shape and dtype; else Wrong says what it is instead."""
    whose = f"Rank {rank}: your function returned {what}"
    kind = f"a tensor of shape {list(expected.shape)}"
    if value is None:
        raise case.wrong(
            f"{whose}None, and should return {kind}.",
            "Is the `return` missing? Or does it return what an operation in place gives? dist.recv and dist.all_reduce return no "
            "tensor: return the one that they filled.",
        )
    if not isinstance(value, torch.Tensor):
        extra = " dist.recv returns the rank that sent; the numbers are in the buffer." if type(value) is int else ""
        raise case.wrong(f"{whose}{shown(value)}, and should return {kind}.{extra}")
    try:
        array = value.detach().numpy()
    except Exception:
        raise case.wrong(f"{whose}a tensor without plain numbers ({type(value).__name__} on {value.device}).") from None
    if array.shape != expected.shape:
        raise case.wrong(
            f"{whose}a tensor of shape {list(array.shape)}; expected was the shape {list(expected.shape)}.",
            (explain(rank, array) if explain and array.ndim == expected.ndim else "") or _about_shapes(array, expected),
        )
    if array.dtype != expected.dtype:
        raise case.wrong(
            f"{whose}numbers of dtype {array.dtype}; expected was {expected.dtype}, as in the input. torch.empty_like "
            "keeps the dtype."
        )
    return array


def _about_rounding(expected: np.ndarray, got: np.ndarray) -> str:
    if expected.dtype.kind == "f" and np.allclose(got, expected, rtol=0, atol=0.02 * np.abs(expected).max(initial=0)):
        return "That is close, and not equal. Was something rounded to fewer digits on its way, to float16 or bfloat16?"
    return ""


def _about_shapes(array: np.ndarray, expected: np.ndarray) -> str:
    if array.ndim == expected.ndim and abs(array.size - expected.size) == 1:
        return "Pieces of unequal size: does every buffer have the size of its own piece?"
    return ""


def difference(rank: int, expected: np.ndarray, got: np.ndarray, tolerance: float = 0.0) -> str:
    """Expected against got, from the first element that differs."""
    flat, other, first = expected.reshape(-1), got.reshape(-1), first_unlike(got, expected, tolerance)
    place = "" if first == 0 else f", from element {first} on"
    return f"Rank {rank} should return {numbers(flat[first:])}{place}; it returned {numbers(other[first:])}."


def same(came: np.ndarray, other: np.ndarray, tolerance: float = 0.0) -> bool:
    """Whether these are the same numbers."""
    return came.shape == other.shape and not unlike(came, other, tolerance).any()


def first_unlike(got: np.ndarray, expected: np.ndarray, tolerance: float = 0.0) -> int:
    return int(np.flatnonzero(unlike(got, expected, tolerance))[0])


def numbers(values: np.ndarray) -> str:
    """A few numbers in brackets."""
    flat = values.reshape(-1)
    words = [f"{value:.6g}" for value in flat[:_SHOWN].tolist()]
    return f"[{', '.join(words)}{', ...' if len(flat) > _SHOWN else ''}]"


def who(active: list[int], wrong: list[int]) -> str:
    if len(active) < 2 or len(wrong) == len(active):
        return ""
    right = [rank for rank in active if rank not in wrong]
    if right == [0]:
        return "Rank 0 is right, every other rank is wrong."
    return f"Right: rank {', '.join(map(str, right))}. Wrong: rank {', '.join(map(str, wrong))}."


def combination(got: np.ndarray, sources: Sequence[np.ndarray]) -> np.ndarray | None:
    """The factors with which `got` is a sum of `sources`, if they are unique and simple (halves, thirds ...); else None."""
    matrix = np.stack([source.reshape(-1) for source in sources], axis=1).astype(float)
    target = got.reshape(-1).astype(float)
    if len(target) < 2 * len(sources):
        return None
    factors, _, rank, _ = np.linalg.lstsq(matrix, target, rcond=None)
    if rank < len(sources) or not np.allclose(matrix @ factors, target, atol=1e-2):
        return None
    return np.round(factors * 60) / 60


def explain_sum(rank: int, got: np.ndarray, sources: Sequence[np.ndarray]) -> str:
    """What was added wrongly, if `got` should be the sum of every rank's `sources` and is another combination of them."""
    n = len(sources)
    factors = combination(got, sources)
    if factors is None or not factors.any():
        return ""
    if np.array_equal(factors, np.eye(n)[rank]):
        return f"These are rank {rank}'s own numbers: nothing was added to them."
    if n > 1 and np.allclose(factors, 1 / n, atol=0.01):
        return f"This is the sum divided by {n}: the mean. The sum was asked for."
    if np.count_nonzero(factors) == 1 and factors.max() == 1:
        return f"These are rank {int(factors.argmax())}'s numbers alone: they replaced yours, instead of being added."
    missing = [str(q) for q in range(n) if factors[q] == 0]
    often = [f"rank {q}'s {factors[q]:g} times" for q in range(n) if factors[q] not in (0, 1)]
    parts = [
        f"the numbers of rank {', '.join(missing)} are missing" if missing else "",
        f"it holds {', '.join(often)}" if often else "",
    ]
    text = "; ".join(part for part in parts if part)
    return f"In this sum {text}." if text else ""


def owner_of(got: np.ndarray, arrays: Sequence[np.ndarray]) -> int | None:
    """The rank whose numbers these are, if any."""
    return next((rank for rank, array in enumerate(arrays) if got.size and np.array_equal(got, array)), None)


def number(value: Any) -> float | None:
    """A plain number out of what an answer returned: int, float, numpy scalar, or a tensor with one element; else None."""
    if isinstance(value, bool) or value is None:
        return None
    try:
        return float(value) if isinstance(value, (int, float, np.number)) or getattr(value, "numel", int)() == 1 else None
    except Exception:
        return None


def expect_close(got: float, expected: float, tolerance: float) -> bool:
    """Whether two numbers agree to within a fraction `tolerance` of the expected one."""
    return np.isfinite(got) and abs(got - expected) <= tolerance * abs(expected)
