"""Gradients: give an answer modules or tensors that train, different on every rank, and compare what they hold with one process.

A judge hands over `Net(build, fresh(), ...)`, a small nn.Module with whole numbers for weights (and, with gradients=fresh(), with
gradients), or `draw(4, 6, requires_grad=True)`, a tensor that wants a gradient. An answer may call backward itself. Or the trial
does, from a given gradient of what the answer returned:

    inputs = [(Net(layer, fresh()), draw(4, 6, requires_grad=True)) for _ in range(ranks)]
    case = trial.run(inputs, upstream=[draw(4, 2)] * ranks)
    expect(case, values)                                              # values.py: what it returned, on each rank
    expect_gradients(case, 0, [{"weight": ..., "bias": ...}, ...], mistakes=...)   # by rank and name, of argument 0
    expect_gradients(case, 1, [array, ...], mistakes=...)             # argument 1 is a tensor
    expect_calls(case, [("all_reduce", 96)], label="backward")        # structure.py: and what was called on the way

`one_process` gives the right numbers: the same module made here, run forward and backward by torch; `differentiated` does it for a
plain function of tensors. `expect_values` compares parameters and buffers after the call, as an optimiser step or a broadcast
should leave them. All compare exactly, or to within `tolerance` times the largest expected number, where there is division.
`case.returned[rank].kept` are the bytes that autograd kept for backward on that rank.

`mistakes(rank, name)` lists pairs (a wrong array, the sentence about the mistake that gives exactly it). What many mistakes have in
common is found without: no gradient, zeros, n times the right one, a rank's own part that was never summed (`own`, same form as
`expected`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from .inside import Draw, Net
from .trial import Case
from .values import first_unlike, numbers, same, unlike, who

Arrays = dict[str, "np.ndarray | None"]  # by name, a tensor's own is ""; None: there should be none
Mistakes = Callable[[int, str], Iterable[tuple[np.ndarray, str]]]


def one_process(net: Net, *inputs: np.ndarray, upstream: np.ndarray | None = None) -> tuple[np.ndarray, Arrays, list]:
    """(what the module returns, gradients of its parameters, those of floating-point inputs), backward from `upstream` (or 1)."""
    with torch.device("cpu"):
        model = net.make()
    model.zero_grad()
    value, of_inputs = differentiated(model, *inputs, upstream=upstream)
    return value, {name: None if p.grad is None else p.grad.numpy() for name, p in model.named_parameters()}, of_inputs


def differentiated(function: Callable, *inputs: np.ndarray, upstream: np.ndarray | None = None) -> tuple[np.ndarray, list]:
    """(what a function of tensors returns, gradients of its floating-point inputs; None where there is none), on one process."""
    with torch.device("cpu"), torch.enable_grad():
        given = [torch.from_numpy(x.copy()) for x in inputs]
        for x in given:
            x.requires_grad_(x.is_floating_point())
        value = function(*given)
        value.backward(None if upstream is None else torch.from_numpy(upstream.copy()))
    return value.detach().numpy(), [None if x.grad is None else x.grad.numpy() for x in given]


def expect_gradients(
    case: Case,
    position: int,
    expected: Sequence[Arrays | np.ndarray | None],
    mistakes: Mistakes | None = None,
    own: Sequence[Arrays | np.ndarray | None] | None = None,
    tolerance: float = 0.0,
) -> None:
    """The gradients of argument `position` are expected[rank] on every rank that took part; else Wrong.

    Names that are left out of expected[rank] may have any gradient.
    """
    for rank in case.active:
        if case.returned[rank].backward:
            raise case.wrong(
                f"Rank {rank}: backward cannot go through what your function returned: {case.returned[rank].backward}.",
                "Autograd follows operations on tensors that require gradients; it does not see through .detach(), .data, "
                "torch.no_grad(), or a buffer that communication filled.",
            )
    got = {rank: case.state(rank, position).gradients for rank in case.active}
    _compare(case, position, "the gradient of ", got, expected, mistakes, own, tolerance)


def expect_values(
    case: Case,
    position: int,
    expected: Sequence[Arrays],
    mistakes: Mistakes | None = None,
    own: Sequence[Arrays] | None = None,
    tolerance: float = 0.0,
) -> None:
    """After the call, parameters and buffers of argument `position` are expected[rank] on every rank that took part; else Wrong."""
    got = {rank: case.state(rank, position).values for rank in case.active}
    for rank in case.active:
        for name, array in expected[rank].items():
            if name in got[rank] and got[rank][name].dtype != array.dtype:
                raise case.wrong(
                    f"Rank {rank}: {name} has the dtype {got[rank][name].dtype}; expected was {array.dtype}, as it was."
                )
    _compare(case, position, "", got, expected, mistakes, own, tolerance)


def _compare(case, position, what, got, expected, mistakes, own, tolerance) -> None:
    wanted = {rank: _named(expected[rank]) for rank in case.active}
    wrong = {
        rank: [name for name, array in arrays.items() if _differ(got[rank].get(name), array, tolerance)]
        for rank, arrays in wanted.items()
    }
    bad = [rank for rank in case.active if wrong[rank]]
    if not bad:
        return
    rank = bad[0]
    name = wrong[rank][0]
    right, came = wanted[rank][name], got[rank].get(name)
    subject = f"{what}{name or case.trial.exercise.parameters[position]}"
    why = _explain(rank, name, came, right, mistakes, tolerance) or _usual(
        case, came, right, None if own is None else _named(own[rank]).get(name), what, tolerance
    )
    raise case.wrong(_told(rank, subject, right, came, tolerance), who(case.active, bad), _others(wrong[rank], wanted[rank]), why)


def _named(arrays) -> Arrays:
    return arrays if isinstance(arrays, dict) else {} if arrays is None else {"": arrays}


def _differ(came, right, tolerance) -> bool:
    if came is None or right is None:
        return came is not right
    return came.shape != right.shape or bool(unlike(came, right, tolerance).any())


def _told(rank, subject, right, came, tolerance) -> str:
    if right is None:
        return f"Rank {rank}: {subject} should be None; it is {numbers(came)}."
    if came is None:
        return f"Rank {rank}: {subject} should be {numbers(right)}; there is none."
    if came.shape != right.shape:
        return f"Rank {rank}: {subject} should have the shape {list(right.shape)}; it has {list(came.shape)}."
    first = first_unlike(came, right, tolerance)
    place = f", from element {first} on" if first else ""
    return (
        f"Rank {rank}: {subject} should be {numbers(right.reshape(-1)[first:])}{place}; it is {numbers(came.reshape(-1)[first:])}."
    )


def _others(wrong: list[str], wanted: Arrays) -> str:
    """Which names are right and which are wrong, where that tells something."""
    right = [name for name in wanted if name not in wrong]
    return f"Right there: {', '.join(right[:4])}. Wrong: {', '.join(wrong[:4])}." if right else ""


def _explain(rank, name, came, right, mistakes, tolerance) -> str:
    if mistakes is None or right is None:
        return ""
    came = np.zeros_like(right) if came is None else came  # no gradient is like a gradient of zero
    return next((text for array, text in mistakes(rank, name) if array is not None and same(came, array, tolerance)), "")


def _usual(case: Case, came, right, own, what, tolerance) -> str:
    """The mistakes that can be seen without knowing the exercise."""
    n = case.ranks
    if right is None:
        return "A frozen parameter gets no gradient."
    if came is not None and came.shape != right.shape:
        return ""
    if came is None or (not came.any() and what):
        return "Did backward reach it, on this rank, too?" if what else "Is it still in the model?"
    if own is not None and same(came, own, tolerance):
        return "This is what the rank has on its own: it was never combined with what the other ranks have."
    for factor, text in ((n, f"{n} times"), (1 / n, f"1/{n} of"), (-1, "minus")):
        if n > 1 and same(came, factor * right, max(tolerance, 1e-6)):
            return f"This is exactly {text} the right one."
    if tolerance and same(came, right, 0.02):
        return "That is close, and not equal. Was something rounded to fewer digits on its way, to float16 or bfloat16?"
    return ""


__all__ = ["Draw", "Net", "expect_gradients", "differentiated", "expect_values", "one_process", "same"]
