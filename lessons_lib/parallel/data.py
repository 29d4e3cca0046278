"""Data parallel from scratch: every rank holds the whole model and a part of the batch, and gradients are averaged over samples.

    broadcast_parameters(model)
    mine = split_batch(batch)
    loss_of(mine).backward()                              # the mean over this rank's samples
    average_gradients(model, share=len(mine) / len(batch))
    optimizer.step()                                      # the same on every rank

G is the bytes of all gradients, P the number of parameters (tensors), n the ranks. An all-reduce of S bytes makes each rank send
2(n-1)/n x S. Parameters that are tied count once, frozen ones not at all. `group` is by default all ranks; ranks are counted within
it. Buckets that overlap with backward are in `buckets`, sharded states (ZeRO) in `sharded`; both can be had from here.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from numbers import Integral, Real

import torch
import torch.distributed as dist
from torch import nn

from .buckets import BUCKET_BYTES, Buckets
from .flat import by_dtype, hand_back, one_buffer, parts_of_batch, samples_of, sum_of_squares, trainable, weighted_gradient
from .messages import flat, position
from .sharded import FlatUnit, Zero1, Zero2, Zero3, units_of

__all__ = [
    "BUCKET_BYTES", "Buckets", "FlatUnit", "Zero1", "Zero2", "Zero3", "accumulate_gradients", "average_gradients",
    "average_gradients_flat", "broadcast_parameters", "clip_gradients", "parameters_in_use", "share_of_batch", "split_batch",
    "units_of",
]  # fmt: skip


# ---- replicate and split ---------------------------------------------------------------------------------------------------


def broadcast_parameters(model, root=0, group=None) -> None:
    """Every rank's parameters and buffers become those of rank `root`, however the ranks were seeded.

    A broadcast a tensor, frozen ones too: the bytes of the model in all. Once, before the first step.
    """
    tensors = tensors_of(model)
    position(group, root)
    for tensor in tensors:
        dist.broadcast(flat(tensor), group_src=root, group=group)


def tensors_of(model) -> list[torch.Tensor]:
    """Parameters and buffers, each once."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, not {model!r} (a {type(model).__name__}).")
    return [*model.parameters(), *model.buffers()]


def split_batch(batch, group=None) -> torch.Tensor:
    """This rank's samples of `batch` (samples, ...), a view; the first ranks have one more where n does not divide.

    Nothing is sent. With fewer samples than ranks the last ranks have none: their share is 0.
    """
    rank, n = position(group)
    return samples_of(batch).tensor_split(n)[rank]


def share_of_batch(samples, group=None) -> float:
    """`samples` of this rank / samples of all ranks: for where no rank knows the whole batch. An all-reduce of 8 bytes,
    on PyTorch's default device.
    """
    if isinstance(samples, bool) or not isinstance(samples, Integral) or not 0 <= samples < 2**62:
        raise ValueError(f"samples is {samples!r}, but must be the number of samples (or tokens) of this rank, 0 or more.")
    position(group)
    total = torch.tensor(samples)
    dist.all_reduce(total, group=group)
    if not total:
        raise ValueError("No rank has a sample (samples is 0 on all of them), so there is no mean.")
    return samples / total.item()


# ---- average the gradients ---------------------------------------------------------------------------------------------------


def average_gradients(parameters, share, group=None) -> None:
    """The gradient becomes the mean over all samples: sum over ranks of share x gradient, each the mean of that rank's samples.

    P all-reduces, G bytes in all. A rank without a gradient adds zeros. `share`: this rank's samples / all samples; with 1/n for
    uneven parts the result is a mean of means, which is another number.
    """
    for p in trainable(parameters):
        p.grad = weighted_gradient(p, share)
        dist.all_reduce(p.grad, group=group)


def average_gradients_flat(parameters, share, group=None) -> None:
    """The same through one buffer: 1 all-reduce (one a dtype) of G bytes, so latency is paid once. It takes G bytes more memory."""
    for same in by_dtype(trainable(parameters)):
        buffer = one_buffer([weighted_gradient(p, share) for p in same])
        dist.all_reduce(buffer, group=group)
        hand_back(buffer, same)


def parameters_in_use(parameters, group=None) -> list[nn.Parameter]:
    """Those of the parameters that have a gradient on some rank. An all-reduce of P bytes; call it after backward.

    One process leaves a parameter without gradient alone, while AdamW decays one whose gradient is zero: average these only.
    """
    position(group)
    parameters = trainable(parameters)
    used = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8, device=parameters[0].device)
    dist.all_reduce(used, op=dist.ReduceOp.MAX, group=group)
    return [p for p, one in zip(parameters, used.tolist()) if one]


# ---- several microbatches, one synchronisation -----------------------------------------------------------------------------------


def accumulate_gradients(loss_of, microbatches, buckets=None) -> torch.Tensor:
    """Gradients of the mean loss over all samples of `microbatches`, a list of tensors (samples, ...); returns that mean loss.

    loss_of(microbatch) is the mean loss of one. Each is scaled by its part of the samples before backward (1/m for m equal ones).
    Nothing is sent: average once afterwards. Or, with `buckets`, the last backward alone sends; wait for it afterwards.
    """
    parts, total = parts_of_batch(microbatches, loss_of), 0.0
    for number, (microbatch, part) in enumerate(zip(microbatches, parts), 1):
        quiet = buckets is not None and number < len(parts)
        with buckets.no_synchronisation() if quiet else nullcontext():
            loss = loss_of(microbatch) * part
            loss.backward()
        total = total + loss.detach()
    return total


# ---- clip --------------------------------------------------------------------------------------------------------------------


def clip_gradients(max_norm, replicated=(), sharded=(), group=None) -> torch.Tensor:
    """Scale all gradients so that their norm over the whole model is at most `max_norm`; returns the norm before.

    `replicated`: parameters that every rank holds with the same gradient (after averaging): counted once, here. `sharded`: those of
    which every rank holds another part: their squares are summed over ranks. An all-reduce of one number; none without `sharded`.
    """
    max_norm, (alike, parts) = limit(max_norm), told_apart(replicated, sharded)
    squares = sum_of_squares(parts)
    if parts:
        dist.all_reduce(squares, group=group)
    norm = (squares + sum_of_squares(alike)).sqrt()
    scale_gradients(alike + parts, max_norm / (norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_ does
    return norm


def limit(max_norm) -> float:
    """`max_norm`, which must be a positive number."""
    if isinstance(max_norm, bool) or not isinstance(max_norm, Real) or math.isnan(max_norm) or max_norm <= 0:
        raise ValueError(f"max_norm is {max_norm!r}, but must be a positive number, such as 1.0.")
    return float(max_norm) if max_norm < 1e300 else math.inf


def scale_gradients(parameters, scale) -> None:
    """Multiply all gradients by `scale`, a tensor of one number, where that is below 1."""
    for p in parameters:
        if p.grad is not None:
            p.grad.mul_(scale.clamp(max=1.0))


def told_apart(replicated, sharded) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Both as lists of parameters that train, each once; ValueError where a parameter is among both."""
    empty = (isinstance(given, (list, tuple)) and not given for given in (replicated, sharded))
    alike, parts = ([] if none else trainable(given) for none, given in zip(empty, (replicated, sharded)))
    if not alike and not parts:
        raise ValueError("There are no gradients to clip: give replicated=model.parameters(), or sharded=zero.shards.")
    if both := {id(p) for p in alike} & {id(p) for p in parts}:
        raise ValueError(f"{len(both)} of the parameters are among both the replicated and the sharded ones: each is one of them.")
    return alike, parts
