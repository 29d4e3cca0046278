"""Linear layers cut over the ranks of a group, from a given whole nn.Linear: by columns, then by rows.

Y = XA. By columns, each rank makes a part of Y's columns; by rows, each rank has a part of X's columns and makes a part of the sum.
nn.Linear.weight is (outputs, inputs), the transpose of A: the columns of A are dim 0 of the weight. Source: arXiv:1909.08053.

`sharded` names the parameters of which each rank holds another part; the others are replicated: the same on all ranks.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from .conjugates import f, g, share
from .messages import position


class ColumnParallelLinear(nn.Module):
    """x (..., inputs), the same on all ranks -> this rank's outputs (..., outputs / n). Weight and bias are cut.

    parts: sizes of the matrices fused in `full`, one below the other, such as Q, K and V: each is cut, and this rank's parts are
    fused anew. enter: f (no call forward, an all-reduce of x's size backward), gather_sequence, or inside.
    """

    sharded = ("weight", "bias")

    def __init__(self, full, group=None, *, parts=None, enter=f):
        super().__init__()
        weight, bias = linear(full)
        parts = fused(parts, weight)
        self.group, self.enter = group, enter
        self.weight = parameter(weight, lambda w: cut(w, parts, group))
        self.bias = parameter(bias, lambda b: cut(b, parts, group))

    def forward(self, x):
        x = self.enter(fitting(x, self.weight, "all inputs"), self.group)
        return F.linear(x, self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """This rank's inputs (..., inputs / n) -> the sum over ranks (..., outputs), to which the whole bias is added once.

    leave: g (an all-reduce of the output's size forward, no call backward) or scatter_sequence. The bias is replicated: inside the
    sum it would count n times.
    """

    sharded = ("weight",)

    def __init__(self, full, group=None, *, leave=g):
        super().__init__()
        weight, bias = linear(full)
        self.group, self.leave = group, leave
        self.weight = parameter(weight, lambda w: cut(w.T, [w.shape[1]], group, "inputs of the linear layer").T)
        self.bias = parameter(bias, lambda b: b)

    def forward(self, x):
        y = F.linear(fitting(x, self.weight, "this rank's part of the inputs alone"), self.weight)
        y = self.leave(y, self.group)
        return y if self.bias is None else y + self.bias


def cut(x, parts, group=None, what="outputs of the linear layer"):
    """This rank's share of the rows of `x`: of each of the parts, one below the other."""
    rank, _ = position(group)
    lengths = [share(part, what, group) for part in parts]
    return torch.cat([p.narrow(0, rank * length, length) for p, length in zip(x.split(list(parts)), lengths)])


def parameter(whole, taken) -> nn.Parameter | None:
    """A parameter with memory of its own: `taken` of the whole one, frozen if that is; None of None.

    Cutting a model is no part of a training step: it is neither counted nor recorded.
    """
    if whole is None:
        return None
    with torch.no_grad(), _disable_current_modes():
        mine = taken(whole.detach()).clone(memory_format=torch.contiguous_format)
    return nn.Parameter(mine, requires_grad=whole.requires_grad)


def replica(module):
    """A copy of a module that is the same on all ranks, such as a norm; not recorded either. None of None."""
    with _disable_current_modes():
        return copy.deepcopy(module)


def fused(parts, weight):
    """The sizes of the fused matrices, one by default; ValueError unless they make up all outputs."""
    outputs = weight.shape[0]
    if parts is None:
        return [outputs]
    whole = isinstance(parts, (list, tuple)) and all(isinstance(p, int) and not isinstance(p, bool) and p > 0 for p in parts)
    if not whole or sum(parts) != outputs:
        raise ValueError(f"parts must be a list of sizes above 0 that sum to the layer's {outputs} outputs, not {parts!r}.")
    return list(parts)


def fitting(x, weight, which):
    """`x`, if its last dimension is what the weight takes."""
    if not isinstance(x, torch.Tensor) or x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        shown = f"of {tuple(x.shape)}" if isinstance(x, torch.Tensor) else f"{x!r} (a {type(x).__name__})"
        raise ValueError(f"x must be a tensor of (..., {weight.shape[1]}), {which}, not {shown}.")
    return x


def linear(full):
    """(weight, bias or None) of a whole linear layer; TypeError if it is none."""
    if not isinstance(full, nn.Linear):
        raise TypeError(f"A whole nn.Linear is needed, to be cut here, not {full!r} (a {type(full).__name__}).")
    return full.weight, full.bias
