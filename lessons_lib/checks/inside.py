"""What a check does inside a rank: make this rank's inputs, call the answer once, and look what it did to them.

Inputs are drawn with numpy and compared with numpy: the recorder sees the learner's operators and no others.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import record_function


@dataclass(frozen=True)
class Draw:
    """A tensor of random whole numbers from -`largest` (or `smallest`) to `largest`: readable, and sums are exact in every order.

    What travels is the seed: rank and check draw the same numbers, and neither can change the other's.
    """

    seed: int
    shape: tuple[int, ...]
    dtype: str = "float32"
    largest: int = 99
    requires_grad: bool = False
    smallest: int | None = None
    start: tuple[int, ...] = ()  # the first numbers, where a text tells of them

    def array(self) -> np.ndarray:
        low = -self.largest if self.smallest is None else self.smallest
        numbers = np.asarray(np.random.default_rng(self.seed).integers(low, self.largest + 1, self.shape))
        numbers.reshape(-1)[: len(self.start)] = self.start
        return numbers.astype(self.dtype)

    def make(self) -> torch.Tensor:
        return torch.from_numpy(self.array()).requires_grad_(self.requires_grad)


@dataclass(frozen=True)
class Part(Draw):
    """A rank's piece of a Draw: `length` rows (or columns: `axis` 1) from rank * length on. Made by part()."""

    axis: int = 0
    rank: int = 0
    length: int = 0

    def array(self) -> np.ndarray:
        return np.ascontiguousarray(super().array().take(range(self.rank * self.length, (self.rank + 1) * self.length), self.axis))


@dataclass(frozen=True)
class Net:
    """An nn.Module: what build(*arguments) makes, its parameters and buffers filled with whole numbers from `seed`.

    With `gradients`, another seed, every parameter that trains has a gradient, too, but for those named in `without`. `build` must
    be a function of a module (it travels by its name), and its module must not draw when called. Tied parameters stay tied.
    """

    build: Callable[..., nn.Module]
    seed: int
    arguments: tuple = ()
    gradients: int | None = None
    without: tuple[str, ...] = ()
    largest: int = 9

    def make(self) -> nn.Module:
        with torch.device("cpu"), torch.random.fork_rng(devices=[]):
            model = self.build(*self.arguments)
        rng = np.random.default_rng(self.seed)
        for tensor in [*model.parameters(), *model.buffers()]:
            _fill(tensor.data, rng, self.largest)
        if self.gradients is not None:
            rng = np.random.default_rng(self.gradients)
            for name, p in model.named_parameters():
                gradient = _fill(torch.empty_like(p.data), rng, self.largest)
                if p.requires_grad and name not in self.without:
                    p.grad = gradient
        return model

    def state(self) -> State:
        """Parameters, buffers and gradients as they are before the call."""
        return state_of(self.make())


def _fill(tensor: torch.Tensor, rng, largest: int) -> torch.Tensor:
    return tensor.copy_(torch.from_numpy(np.asarray(rng.integers(-largest, largest + 1, tuple(tensor.shape)))))


@dataclass(frozen=True)
class State:
    """What a tensor or a module holds: values and gradients by name (a tensor's is ""); a gradient is None where there is none.

    `notes` is what a module of nets.py wrote down about its calls.
    """

    values: dict[str, np.ndarray] = field(default_factory=dict)
    gradients: dict[str, np.ndarray | None] = field(default_factory=dict)
    notes: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Returned:
    """What an answer returned on one rank, which of its arguments it changed (by position), and what these hold afterwards.

    `backward` says how the backward through the value went: "" (not asked for, or done), or why it could not be; `kept` are the
    bytes that autograd kept for it, beside the arguments.
    """

    value: Any
    changed: tuple[int, ...] = ()
    states: tuple[State | None, ...] = ()
    backward: str = ""
    kept: int = 0


def call(answer: Callable, inputs: Sequence[tuple | None], upstream: Sequence[Draw | None] | None = None) -> Returned | None:
    """Call the answer with inputs[rank]; a rank whose inputs are None sits out.

    With `upstream`, run backward through what it returned, from the gradient upstream[rank]; the recording then labels the events
    of the two parts "forward" and "backward".
    """
    rank = dist.get_rank()
    given = inputs[rank]
    if given is None:
        return None
    arguments = [_made(value) for value in given]
    if upstream is None:
        value, problem, kept = _call(answer, arguments), "", 0
    else:
        saved: list[torch.Tensor] = []
        with record_function("forward"), saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
            value = _call(answer, arguments)
        kept = _bytes_of([*saved, *_kept_by_functions(value)], arguments)
        saved.clear()
        with record_function("backward"):
            problem = _backward(value, upstream[rank])
    changed = tuple(n for n, (before, after) in enumerate(zip(given, arguments)) if _is_changed(before, after))
    states = tuple(_state(argument) for argument in arguments)
    return Returned(_detached(value), changed, states, problem, kept)


def call_shapes(answer: Callable, make: Callable, arguments: Sequence, steps: int = 1) -> None:
    """Call the answer `steps` times with what make(*arguments) gives, under shapes_only: nothing is returned or compared."""
    given = make(*arguments)
    for _ in range(steps):
        with record_function("forward"):
            _call(answer, given)
        for one in given:
            if isinstance(one, nn.Module):
                one.zero_grad()


def call_each(answer: Callable, inputs: Sequence[tuple]) -> list[Any]:
    """Call an answer that does not communicate with one set of arguments after the other."""
    return [_call(answer, copy.deepcopy(list(given))) for given in inputs]


def _call(answer: Callable, arguments: list) -> Any:
    try:
        return answer(*arguments)
    except SystemExit as exit:  # 0 would look as if the program had returned
        raise SystemExit(str(exit.code or 0)) from None


def _made(value: Any) -> Any:
    """What the answer is given: every Draw a tensor, every Net a module, also inside of lists."""
    if isinstance(value, (Draw, Net)):
        return value.make()
    if isinstance(value, (list, tuple)):
        return type(value)(_made(one) for one in value)
    return copy.deepcopy(value)


def _is_changed(before: Any, after: Any) -> bool:
    if isinstance(before, Draw):
        return not np.array_equal(after.detach().numpy(), before.array())
    if isinstance(before, Net):
        old, new = before.state().values, state_of(after).values
        return old.keys() != new.keys() or any(not np.array_equal(old[name], new[name]) for name in old)
    if isinstance(before, (list, tuple)):
        return len(before) != len(after) or any(map(_is_changed, before, after))
    return bool(after != before)


def _bytes_of(tensors: list[torch.Tensor], arguments: list) -> int:
    """Bytes of the memory behind tensors, each counted once; that of arguments is the caller's."""
    own = {one.untyped_storage().data_ptr() for one in arguments if isinstance(one, torch.Tensor)}
    memory = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(nbytes for place, nbytes in memory.items() if place not in own)


def _kept_by_functions(value: Any) -> list[torch.Tensor]:
    """Tensors that torch.autograd.Functions keep as plain attributes of ctx, which no hook sees."""
    found, seen, todo = [], set(), [getattr(value, "grad_fn", None)]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        kept = list(getattr(node, "__dict__", {}).values())
        for one in kept:
            kept += one if isinstance(one, (list, tuple)) else []
        found += [one for one in kept if isinstance(one, torch.Tensor)]
        todo += [following for following, _ in node.next_functions]
    return found


def _backward(value: Any, upstream: Draw) -> str:
    if not isinstance(value, torch.Tensor) or tuple(value.shape) != upstream.array().shape:
        return "it is not the tensor that was asked for"
    if not value.requires_grad:
        return "nothing leads back from it"
    value.backward(upstream.make().to(value.dtype))
    return ""


def _state(argument: Any) -> State | None:
    if isinstance(argument, nn.Module):
        return state_of(argument)
    if isinstance(argument, torch.Tensor) and argument.requires_grad and argument.is_leaf:
        return State({"": _array(argument)}, {"": _array(argument.grad)})
    return None


def state_of(model: nn.Module) -> State:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return State(
        {name: _array(tensor) for name, tensor in tensors.items()},
        {name: _array(p.grad) for name, p in model.named_parameters()},
        tuple(getattr(model, "notes", ())),
    )


def _array(tensor: torch.Tensor | None) -> np.ndarray | None:
    return None if tensor is None else tensor.detach().numpy().copy()


def _detached(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.grad_fn is not None:
        return value.detach()
    return type(value)(map(_detached, value)) if type(value) in (list, tuple) else value
