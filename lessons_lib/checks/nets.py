"""Small modules that checks hand to answers. Imported in the ranks: torch and nothing else."""

from __future__ import annotations

import torch
from torch import nn


class Assorted(nn.Module):
    """A tied table, a frozen bias, parameters of several sizes: what averaging has to cope with."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.middle = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.table.weight
        self.norm.bias.requires_grad_(False)


class Kept(nn.Module):
    """A layer that trains, one that is frozen, and a norm with buffers."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(40, 30)
        self.norm = nn.BatchNorm1d(30)
        self.frozen = nn.Linear(30, 20).requires_grad_(False)


class MeanSquare(nn.Module):
    """samples (n, 4) -> the mean loss over these samples. `notes`: ("F", i) for forward number i, ("B", i) for its backward."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(4, 3)
        self.notes = []

    def forward(self, samples):
        loss = self.line(samples).square().sum(-1).mean()
        number = sum(kind == "F" for kind, _ in self.notes)
        self.notes.append(("F", number))
        if loss.requires_grad:
            loss.register_hook(lambda gradient: self.notes.append(("B", number)))
        return loss


class Stack(nn.Module):
    """samples (n, width) -> the mean loss. The last layer that is registered runs first."""

    def __init__(self, width: int, depth: int):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, samples):
        x = samples
        for layer in reversed(self.layers):
            x = x + torch.relu(layer(x))
        return x.square().mean()


def stack_and_batch(width: int, depth: int, samples: int):
    """A Stack in bfloat16 and samples for it, at a size that is recorded without data."""
    return Stack(width, depth).bfloat16(), torch.zeros(samples, width, dtype=torch.bfloat16)
