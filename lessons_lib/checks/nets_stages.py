"""Stages of a pipeline that checks hand to answers. Imported in the ranks: torch and nothing else."""

from __future__ import annotations

import torch
from torch import nn

_ROOM = 64  # entries of a stage's log


class Logged(nn.Module):
    """x (samples, width) -> y of the same shape. Its buffer `log`: 2n+1 for the n-th forward, 2n+2 for its backward."""

    def __init__(self, width: int):
        super().__init__()
        self.line = nn.Linear(width, width)
        self.register_buffer("log", torch.zeros(_ROOM))
        self.entries = self.forwards = 0

    def forward(self, x):
        number, self.forwards = self.forwards, self.forwards + 1
        self.note(2 * number + 1)
        return _Noted.apply(self.line(x), self, number)

    def note(self, entry: int) -> None:
        if self.entries == 0:
            self.log.zero_()
        if self.entries < _ROOM:
            self.log[self.entries] = entry
        self.entries += 1


class _Noted(torch.autograd.Function):
    """Hands on what it gets; its backward makes a note."""

    @staticmethod
    def forward(ctx, y, stage, number):
        ctx.stage, ctx.number = stage, number
        return y.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.stage.note(2 * ctx.number + 2)
        return gradient, None, None


class End(nn.Module):
    """The first or the last stage of a model with tied embeddings: a copy of the table, and a layer of its own."""

    def __init__(self, vocabulary: int, width: int):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(vocabulary, width))
        self.line = nn.Linear(width, width)


class Middle(nn.Module):
    """A stage between: no table."""

    def __init__(self, width: int):
        super().__init__()
        self.table = None
        self.line = nn.Linear(width, width)
