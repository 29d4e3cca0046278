"""Runs a schedule that an answer gave on real ranks, one linear layer a stage. Imported in the ranks: torch and nothing heavy."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from ..parallel.pipeline import Stage, run_schedule, split_into_microbatches
from .inside import Draw, Net

SAMPLES, WIDTH = 2, 4  # of a microbatch, and of a stage
FORWARD_FLOPS = 2 * SAMPLES * WIDTH * WIDTH  # of one F; of B or W where backward is split


def layer() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH, bias=False)


def mean_loss(y, target):
    return (y - target).square().mean()


def run_orders(orders, nets: list[Net], inputs: Draw, targets: Draw):
    """This rank's part of the step: (mean loss or None, gradient of its weight)."""
    rank, p = dist.get_rank(), dist.get_world_size()
    model = nets[rank].make()
    stage = Stage([model], rank, p, torch.empty_like)
    microbatches = split_into_microbatches(inputs.make(), targets.make(), inputs.shape[0] // SAMPLES)
    # with gradients of the inputs, B costs on the first stage what it costs on the others
    microbatches = [one._replace(inputs=one.inputs.clone().requires_grad_()) for one in microbatches]
    loss = run_schedule(stage, orders, microbatches, mean_loss)
    return None if loss is None else float(loss), model.weight.grad.numpy()
