"""What is the same on all ranks and what is not: random numbers, gradients of replicated parameters, and the norm of all.

A module's `sharded` names its parameters that are cut; all others are replicas.
"""

from __future__ import annotations

from contextlib import contextmanager
from numbers import Integral, Real

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from .messages import position


class RandomStates:
    """Two streams of random numbers: `replicated`, the same on all ranks of the group, and `sharded`, another on every rank.

    with states.sharded(): ...  draws from that stream; what is outside keeps PyTorch's own state. Replicated activations must share
    their dropout mask, or they drift apart; parts of a sharded one must not, or the masks repeat. No call. Give every
    data-parallel replica another seed. Source: arXiv:1909.08053, appendix B.
    """

    def __init__(self, seed: int, group=None, device="cpu"):
        if isinstance(seed, bool) or not isinstance(seed, Integral) or not 0 <= seed < 2**62:
            raise ValueError(f"seed must be a whole number from 0 to 2**62 - 1, the same on all ranks, not {seed!r}.")
        device = torch.device(device)
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"device must be 'cpu' or 'cuda', not {str(device)!r}.")
        rank, _ = position(group)
        self.device = device
        self.generators = {
            "replicated": torch.Generator(device).manual_seed(int(seed)),
            "sharded": torch.Generator(device).manual_seed(int(seed) + 1 + rank),
        }

    def replicated(self):
        return self._drawing_from("replicated")

    def sharded(self):
        return self._drawing_from("sharded")

    @contextmanager
    def _drawing_from(self, name):
        default, own = self._default(), self.generators[name]
        before = default.get_state()
        default.set_state(own.get_state())
        try:
            yield
        finally:
            own.set_state(default.get_state())
            default.set_state(before)

    def _default(self):
        if self.device.type == "cpu":
            return torch.default_generator
        index = torch.cuda.current_device() if self.device.index is None else self.device.index
        return torch.cuda.default_generators[index]


class ParallelDropout(nn.Module):
    """nn.Dropout that draws its mask from one of the streams: states.replicated or states.sharded."""

    def __init__(self, p, stream):
        super().__init__()
        if isinstance(p, bool) or not isinstance(p, Real) or not 0 <= p < 1:
            raise ValueError(f"p must be a number from 0 up to, but not including, 1 (0.1 drops a tenth), not {p!r}.")
        if p and not callable(stream):
            raise TypeError(f"stream must be states.replicated or states.sharded of some RandomStates, not {stream!r}.")
        self.p, self.stream = p, stream

    def forward(self, x):
        if not self.training or self.p == 0:
            return x
        with self.stream():
            return F.dropout(x, self.p)


def sharded_and_replicated(model: nn.Module):
    """(sharded, replicated) parameters, two lists; a tied one counts once."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, not {model!r} (a {type(model).__name__}).")
    found = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            found[parameter] = found.get(parameter, False) or name in getattr(module, "sharded", ())
    return [p for p, cut in found.items() if cut], [p for p, cut in found.items() if not cut]


def sum_replicated_gradients(model, group=None):
    """Under sequence parallel, after backward: each rank's gradient of a replica came from its own part of the sequence. Sum them.

    Norms, biases of row-parallel layers, position table: one all-reduce for each. Without sequence parallel these gradients are
    whole already, and this would count them n times.
    """
    for p in sharded_and_replicated(model)[1]:
        if p.grad is not None:
            total = p.grad.contiguous()
            dist.all_reduce(total, group=group)
            p.grad.copy_(total)


def gradient_norm(model, group=None):
    """The length of all gradients together, a float32 scalar, the same on all ranks: sharded ones summed over ranks, replicas once.

    One all-reduce of 4 bytes. Under sequence parallel call sum_replicated_gradients first.
    """
    sharded, replicated = (squares(parameters) for parameters in sharded_and_replicated(model))
    dist.all_reduce(sharded, group=group)
    return (sharded + replicated).sqrt()


def clip_gradients(model: nn.Module, largest: float, group=None) -> torch.Tensor:
    """Scale all gradients so that their norm is at most `largest`; returns the norm before."""
    if isinstance(largest, bool) or not isinstance(largest, Real) or not 0 < largest < 1e300:
        raise ValueError(f"largest must be a number above 0 and finite, such as 1.0, not {largest!r}.")
    norm = gradient_norm(model, group)
    scale = (largest / (norm + 1e-6)).clamp(max=1.0)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(scale.to(parameter.grad.dtype))
    return norm


def squares(parameters):
    """The sum of the squares of their gradients, in float32."""
    device = parameters[0].device if parameters else "cpu"
    total = torch.zeros((), device=device)
    for parameter in parameters:
        if parameter.grad is not None:
            total += parameter.grad.float().square().sum()
    return total
