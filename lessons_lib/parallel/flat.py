"""What the data-parallel code shares: samples and shares; which parameters train; weighted gradients, one buffer for many."""

from __future__ import annotations

import functools
from numbers import Real

import torch
from torch import nn

__all__ = ["by_dtype", "check_share", "hand_back", "one_buffer", "one_dtype", "parts_of_batch", "samples_of", "sum_of_squares",
           "trainable", "weighted_gradient"]  # fmt: skip


def trainable(parameters) -> list[nn.Parameter]:
    """Parameters that train, each once (tied ones are one), in the order given: of a model, or of a list of parameters."""
    if isinstance(parameters, torch.Tensor):
        raise TypeError("parameters is one tensor, but must be a model or a list of parameters: give [parameter].")
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    try:
        found = list({id(p): p for p in parameters}.values())
    except TypeError:
        raise TypeError(
            f"parameters must be a model or a list of parameters, not {parameters!r} (a {type(parameters).__name__})."
        ) from None
    for p in found:
        if not isinstance(p, torch.Tensor):
            raise TypeError(f"parameters holds {p!r} (a {type(p).__name__}), but each must be a tensor that is trained.")
    found = [p for p in found if p.requires_grad]
    if not found:
        raise ValueError("parameters holds none that trains (requires_grad), so there is no gradient to average.")
    return found


def check_share(share) -> float:
    """This rank's samples / samples of the whole batch: a number from 0 to 1. The shares of all ranks sum to 1."""
    if isinstance(share, bool) or not isinstance(share, Real) or not 0 <= share <= 1:
        raise ValueError(
            f"share is {share!r}, but must be a number from 0 to 1: the samples of this rank / the samples of the whole batch."
        )
    return float(share)


def weighted_gradient(parameter, share) -> torch.Tensor:
    """`share` x the parameter's gradient, as a new tensor; zeros where this rank has no gradient, or no samples (share 0)."""
    gradient, share = parameter.grad, check_share(share)
    if gradient is None or share == 0:  # the mean over no samples is NaN, and 0 x NaN would be too
        return torch.zeros_like(parameter, memory_format=torch.contiguous_format)
    if gradient.is_sparse:
        raise TypeError("A gradient is sparse (nn.Embedding(sparse=True)): only dense ones lie in a buffer. Use sparse=False.")
    return (gradient * share).contiguous()


def by_dtype(parameters) -> list[list[nn.Parameter]]:
    """The parameters in groups of the same dtype and device, since a buffer has one of each; the order stays."""
    groups: dict = {}
    for p in parameters:
        groups.setdefault((p.dtype, p.device), []).append(p)
    return list(groups.values())


def one_dtype(parameters) -> list[nn.Parameter]:
    """`trainable(parameters)`, which must all have the same dtype, and no hook of somebody else who moves their gradients."""
    parameters = trainable(parameters)
    if any(p._post_accumulate_grad_hooks for p in parameters):
        raise ValueError(
            "A parameter has a hook already that is called when its gradient is complete, such as those of Buckets or of another "
            "Zero2 or Zero3 of the same model: both would take the gradient. Make the model anew, or call buckets.remove() first."
        )
    if len(dtypes := {p.dtype for p in parameters}) > 1:
        names = ", ".join(sorted(map(str, dtypes)))
        raise ValueError(f"The parameters of a unit are of {names}, but one buffer has one dtype: make a unit of each.")
    return parameters


def one_buffer(tensors, multiple=1) -> torch.Tensor:
    """All elements one after the other in a new buffer, padded with zeros to a multiple of `multiple` elements."""
    row = [t.detach().reshape(-1) for t in tensors]
    padding = -sum(t.numel() for t in row) % multiple
    return torch.cat([*row, row[0].new_zeros(padding)])


def hand_back(buffer, parameters) -> None:
    """Every parameter's gradient becomes its piece of the buffer; no element is copied."""
    for p, piece in zip(parameters, buffer.split([p.numel() for p in parameters])):
        p.grad = piece.view(p.shape)


# ---- samples -----------------------------------------------------------------------------------------------------------------


def samples_of(batch) -> torch.Tensor:
    """`batch`, which must be a tensor (samples, ...)."""
    if not isinstance(batch, torch.Tensor) or batch.dim() == 0:
        raise TypeError(f"batch must be a tensor with the samples along its first dimension, not {batch!r}.")
    return batch


def parts_of_batch(microbatches, loss_of) -> list[float]:
    """Of each microbatch, its samples / the samples of all: 1/m for m equal ones. `loss_of` must be a function of one."""
    if not callable(loss_of):
        raise TypeError(f"loss_of must be a function of a microbatch that returns its mean loss, not {loss_of!r}.")
    if not isinstance(microbatches, (list, tuple)) or not microbatches:
        raise ValueError(f"microbatches must be a list of one tensor or more, not {microbatches!r}: batch.tensor_split(m).")
    counts = [len(samples_of(microbatch)) for microbatch in microbatches]
    if 0 in counts:
        raise ValueError(f"The microbatches have {counts} samples, but each must have one or more: take fewer microbatches.")
    return [count / sum(counts) for count in counts]


# ---- norms -------------------------------------------------------------------------------------------------------------------


def sum_of_squares(parameters) -> torch.Tensor:
    """Of all elements of the gradients, in float32, or in float64 where a parameter is: bfloat16 would round it to two digits."""
    if not parameters:
        return torch.zeros(())
    exact = functools.reduce(torch.promote_types, {p.dtype for p in parameters}, torch.float32)
    total = torch.zeros((), dtype=exact, device=parameters[0].device)
    for p in parameters:
        if p.grad is not None:
            total += p.grad.to(exact).square().sum()
    return total
