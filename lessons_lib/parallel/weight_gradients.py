"""Backward in two halves: B, the gradient of the input, which the stage before waits for; W, that of the weights, any time later.

    with WeightGradientsLater() as later:
        y = stage(x)
    y.backward(gradient)        # B: x.grad, and the small gradients (norms, biases, embedding)
    later.run()                 # W: the gradients of all linear layers' weights

Every linear layer that runs inside, in whatever module, keeps its input x and, from B on, the gradient of its output until W.
Nothing is computed twice: W is one matrix product a layer, B the other. A weight used several times, or tied, gets all its parts.
Hooks on a weight (such as those of data parallel's buckets) are not called by W. Under torch.autocast B computes both halves.
Source: arXiv:2401.10241, section 2; its released code puts weight gradients off in the same way.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode


class WeightGradientsLater(TorchFunctionMode):
    """While it is entered, F.linear (and so nn.Linear) computes as always, but puts off its weight's gradient until run()."""

    def __init__(self):
        super().__init__()
        self.jobs = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is F.linear:
            return _linear(self.jobs, *args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))

    def run(self) -> None:
        """Add the weights' gradients to weight.grad. After B; a second call adds nothing."""
        while self.jobs:
            add_weight_gradient(*self.jobs.pop(0))


def add_weight_gradient(weight, x, gradient) -> None:
    """weight.grad += gradient^T x: (outputs, inputs) from gradient (..., outputs) and x (..., inputs)."""
    with torch.no_grad():
        new = as_rows(gradient).t() @ as_rows(x)
        weight.grad = new if weight.grad is None else weight.grad.add_(new)


def as_rows(x):
    return x.reshape(-1, x.shape[-1])


def _linear(jobs, input, weight, bias=None):
    casts = torch.is_autocast_enabled(input.device.type)  # then the product is not of the weight itself: left to autograd
    if casts or not (torch.is_grad_enabled() and weight.requires_grad and weight.is_leaf):
        return F.linear(input, weight, bias)
    return _Linear.apply(input, weight, bias, jobs)


class _Linear(torch.autograd.Function):
    """F.linear, whose backward gives the gradients of input and bias, and leaves a job for that of the weight."""

    @staticmethod
    def forward(ctx, x, weight, bias, jobs):
        ctx.save_for_backward(x)
        ctx.weight, ctx.jobs = weight, jobs  # the parameter itself: a saved tensor may come back as another object
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        ctx.jobs.append((ctx.weight, x, gradient))
        for_x = gradient @ ctx.weight if ctx.needs_input_grad[0] else None
        for_bias = as_rows(gradient).sum(0) if ctx.needs_input_grad[2] else None
        return for_x, None, for_bias, None
