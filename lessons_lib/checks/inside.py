"""What a check does inside a rank: make this rank's inputs, call the answer once, and look whether it changed them.

Inputs are drawn with numpy and compared with numpy: the recorder sees the learner's operators and no others.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Draw:
    """A tensor of random whole numbers from -`largest` to `largest`: readable, and their sums are exact in every order.

    What travels is the seed: rank and check draw the same numbers, and neither can change the other's.
    """

    seed: int
    shape: tuple[int, ...]
    dtype: str = "float32"
    largest: int = 99
    requires_grad: bool = False

    def array(self) -> np.ndarray:
        return np.random.default_rng(self.seed).integers(-self.largest, self.largest + 1, self.shape).astype(self.dtype)


@dataclass(frozen=True)
class Returned:
    """What an answer returned on one rank, and which of its arguments it changed (by position)."""

    value: Any
    changed: tuple[int, ...] = ()


def call(answer: Callable, inputs: Sequence[tuple | None]) -> Returned | None:
    """Call the answer with inputs[rank]; a rank whose inputs are None sits out."""
    given = inputs[dist.get_rank()]
    if given is None:
        return None
    arrays = [value.array() if isinstance(value, Draw) else None for value in given]
    arguments = [
        copy.deepcopy(value) if array is None else torch.from_numpy(array).requires_grad_(value.requires_grad)
        for value, array in zip(given, arrays)
    ]
    value = _call(answer, arguments)
    changed = [
        argument != value if array is None else not np.array_equal(array, value.array())
        for value, array, argument in zip(given, arrays, arguments)
    ]
    return Returned(value, tuple(position for position, is_changed in enumerate(changed) if is_changed))


def call_each(answer: Callable, inputs: Sequence[tuple]) -> list[Any]:
    """Call an answer that does not communicate with one set of arguments after the other."""
    return [_call(answer, copy.deepcopy(list(given))) for given in inputs]


def _call(answer: Callable, arguments: list) -> Any:
    try:
        return answer(*arguments)
    except SystemExit as exit:  # 0 would look as if the program had returned
        raise SystemExit(str(exit.code or 0)) from None
