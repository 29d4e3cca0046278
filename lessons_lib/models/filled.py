"""PyTorch's modules, filled with first values that depend on the seed, the layer and the matrix's name alone.

So a rank that builds only blocks 4 to 7, or cuts a matrix, holds exactly what the whole model holds there, and the global random
state is left alone. Building a model is no part of a training step: filling it is not recorded, and is left out where tensors have
no data (run(..., shapes_only=True), device "meta"). Weights start normal, biases zero, norms one, as in GPT-2.
"""

from __future__ import annotations

import math
import zlib
from numbers import Integral, Real

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from ..shapes import Shape

DEVIATION = 0.02  # of first weights; those that write to the residual stream get 1/sqrt(2 layers) of it [GPT-2, section 2.3]
EPSILON = 1e-5  # of the norms, as in GPT-2 and Llama


class Linear(nn.Linear):
    """nn.Linear, filled from `name` and `seed` instead of the global random state; `residual`: layers of a model it adds to."""

    def __init__(self, name, inputs, outputs, *, bias, residual=0, seed=0, dtype=torch.float32, device="cpu"):
        super().__init__(inputs, outputs, bias=bias, dtype=dtype, device=device)
        _fill(self.weight, DEVIATION / math.sqrt(2 * residual or 1), f"{name} {seed}")
        if bias:
            _fill(self.bias, 0.0)

    def reset_parameters(self):
        pass  # PyTorch's draws from the global random state: a model made on "meta" gets its values by load_state_dict


class Table(nn.Embedding):
    """nn.Embedding (rows, hidden), filled from `name` and `seed`."""

    def __init__(self, name, rows, hidden, *, seed=0, dtype=torch.float32, device="cpu"):
        super().__init__(rows, hidden, dtype=dtype, device=device)
        _fill(self.weight, DEVIATION, f"{name} {seed}")

    def reset_parameters(self):
        pass


class LayerNorm(nn.LayerNorm):
    def reset_parameters(self):
        _fill(self.weight, 1.0)
        _fill(self.bias, 0.0)


class RMSNorm(nn.RMSNorm):
    def reset_parameters(self):
        _fill(self.weight, 1.0)


def norm(shape: Shape, *, seed=0, dtype=torch.float32, device="cpu"):
    """The norm of that shape over the hidden width; it starts with ones (and zeros), whatever the seed."""
    kind = LayerNorm if shape.norm == "layer" else RMSNorm
    return kind(shape.hidden, eps=EPSILON, dtype=dtype, device=device)


def _fill(tensor, value: float, name: str | None = None) -> None:
    """Fill with `value`; or, named, with normal numbers of that deviation. Drawn on the CPU, so that every device gets the same."""
    if isinstance(tensor, FakeTensor) or tensor.device.type == "meta":
        return
    with torch.no_grad(), _disable_current_modes():
        if name is None:
            tensor.fill_(value)
        else:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            tensor.copy_(torch.randn(tensor.shape, generator=generator).mul_(value))


def check(shape, layer, dropout, attention, make) -> None:
    """What every module refuses, in a sentence, before it makes anything."""
    if not isinstance(shape, Shape):
        raise TypeError(f"A shape is needed, such as shapes.TINY, not {shape!r} (a {type(shape).__name__}).")
    if isinstance(layer, bool) or not isinstance(layer, Integral) or not 0 <= layer < shape.layers:
        raise ValueError(
            f"layer must be a whole number from 0 to {shape.layers - 1} (the shape has {shape.layers} layers), not {layer!r}."
        )
    check_dropout(dropout)
    if attention is not None and not callable(attention):
        raise TypeError(f"attention must be a function such as plain_attention or fused_attention, not {attention!r}.")
    if unknown := make.keys() - {"dtype", "device", "seed"}:
        raise TypeError(f"{', '.join(sorted(unknown))} is not known here: a module takes dtype, device and seed.")
    dtype, seed = make.get("dtype", torch.float32), make.get("seed", 0)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"dtype must be a floating-point type such as torch.float32 or torch.bfloat16, not {dtype!r}.")
    if isinstance(seed, bool) or not isinstance(seed, Integral):
        raise TypeError(f"seed must be a whole number, not {seed!r} (a {type(seed).__name__}).")
    try:
        torch.device(make.get("device", "cpu"))
    except (RuntimeError, TypeError):
        raise ValueError(
            f"device must be one that PyTorch knows, such as 'cpu', 'cuda' or 'meta', not {make['device']!r}."
        ) from None


def check_dropout(dropout) -> None:
    if isinstance(dropout, bool) or not isinstance(dropout, Real) or not 0 <= dropout < 1:
        raise ValueError(f"dropout must be a number from 0 up to, but not including, 1 (0.1 drops a tenth), not {dropout!r}.")


def check_stream(x, hidden: int) -> None:
    if not isinstance(x, torch.Tensor) or x.dim() != 3 or x.shape[-1] != hidden or not x.is_floating_point():
        raise TypeError(f"x must be a floating-point tensor of (batch, sequence, hidden = {hidden}), not {described(x)}.")


def described(value) -> str:
    """A value as a complaint shows it; of a tensor the dtype and shape."""
    if isinstance(value, torch.Tensor):
        return f"a {value.dtype} tensor of {tuple(value.shape)}"
    return f"{value!r} (a {type(value).__name__})"
