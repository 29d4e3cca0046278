"""Where a replicated tensor becomes a sharded one and back: communication that autograd knows, each forward with its backward.

A `dist.all_reduce` inside a model is invisible to autograd: gradients would be the local ones, without an error. So each is a
torch.autograd.Function, and its backward is its conjugate. n ranks, b x s x h elements in the whole tensor:

    forward                     backward
    f   identity                    all-reduce of b s h         entering: every rank uses x, so gradients add up
    g   all-reduce of b s h         identity                    leaving: every rank holds a part of the sum
    gather_sequence   all-gather    reduce-scatter              entering, where each rank holds s/n of the sequence
    scatter_sequence  reduce-scatter  all-gather                leaving, the same
    inside   identity               identity                    for a layer whose input has entered already

An all-reduce of S bytes sends 2(n-1)/n x S a rank; the all-gather and the reduce-scatter that replace it (n-1)/n x S each.
Each takes (x, group) and returns a new tensor. Sources: arXiv:1909.08053, figure 3 (f, g); arXiv:2205.05198, section 4.2.2.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from .messages import position

# ---- f and g ---------------------------------------------------------------------------------------------------------------


def summed(x, group=None):
    """The sum over ranks, in a new contiguous tensor: autograd may still use what came in."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return summed(gradient, ctx.group), None


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        return summed(x, group)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def f(x, group=None):
    """Identity forward, all-reduce backward: `x`, the same on all ranks, enters a region where each rank does a part."""
    return Enter.apply(floating(x), group)


def g(x, group=None):
    """All-reduce forward, identity backward: `x`, a part of a sum on each rank, leaves as the sum, the same on all ranks."""
    return Leave.apply(floating(x), group)


def inside(x, group=None):
    """Identity both ways, for a layer whose input has entered already: two layers may share one f."""
    return x


# ---- the pair for a sequence that is cut -----------------------------------------------------------------------------------


def all_gathered(x, group=None):
    """All ranks' parts of dim 1, one after the other. Collectives cut the first dimension: the sequence must come first."""
    _, n = position(group)
    mine = x.transpose(0, 1).contiguous()
    whole = mine.new_empty((n * mine.shape[0], *mine.shape[1:]))
    dist.all_gather_single(whole, mine, group=group)
    return whole.transpose(0, 1).contiguous()


def reduce_scattered(x, group=None):
    """This rank's part of dim 1 of the sum over ranks."""
    _, n = position(group)
    whole = x.transpose(0, 1).contiguous()
    mine = whole.new_empty((whole.shape[0] // n, *whole.shape[1:]))
    dist.reduce_scatter_single(mine, whole, group=group)
    return mine.transpose(0, 1).contiguous()


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return all_gathered(x, group)

    @staticmethod
    def backward(ctx, gradient):
        return reduce_scattered(gradient, ctx.group), None


class Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return reduce_scattered(x, group)

    @staticmethod
    def backward(ctx, gradient):
        return all_gathered(gradient, ctx.group), None


def gather_sequence(x, group=None):
    """(batch, s/n, ...) -> (batch, s, ...): all-gather forward, reduce-scatter backward. Rank r holds the r-th part of dim 1."""
    return Gather.apply(floating(x, 2), group)


def scatter_sequence(x, group=None):
    """(batch, s, ...) -> (batch, s/n, ...): reduce-scatter forward, all-gather backward. ValueError where n does not divide s."""
    share(floating(x, 2).shape[1], "positions of the sequence", group)
    return Scatter.apply(x, group)


# ---- checks ----------------------------------------------------------------------------------------------------------------


def share(size: int, what: str, group=None) -> int:
    """size / n, each rank's part of `size` things; ValueError in a sentence where n does not divide it."""
    _, n = position(group)
    if size % n:
        below = next(m for m in range(n, 0, -1) if size % m == 0)
        raise ValueError(
            f"The {size:,} {what} cannot be cut into equal parts for {n} ranks: {size:,} / {n} leaves {size % n} over. "
            f"Use {below} rank{'s'[: below > 1]}, or a size that {n} divides, such as {(size // n + 1) * n:,}."
        )
    return size // n


def floating(x, least=0):
    """`x`, if it is a floating-point tensor of at least that many dimensions."""
    if not isinstance(x, torch.Tensor) or x.dim() < least or not x.is_floating_point():
        shown = f"a {x.dtype} tensor of {tuple(x.shape)}" if isinstance(x, torch.Tensor) else f"{x!r} (a {type(x).__name__})"
        form = " of (batch, sequence, ...)" if least else ""
        raise TypeError(f"x must be a floating-point tensor{form}, not {shown}.")
    return x
