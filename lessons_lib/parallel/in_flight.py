"""Bytes that autograd keeps between forward and backward, counted while a program runs: now, and at most.

    with ActivationMeter(stage) as meter:
        one_f_one_b_step(stage, microbatches, mean_loss)
    meter.peak                  # bytes

Measured on this rank by hooks on what autograd saves; also without data (shapes_only). Memory that several saved tensors share
counts once. Not counted: parameters, and what waits for W where backward is split.
"""

from __future__ import annotations

import weakref

import torch
from torch import nn


class ActivationMeter:
    """`now` and `peak`: bytes that are kept for backward."""

    def __init__(self, *modules: nn.Module):
        if not modules or not all(isinstance(module, nn.Module) for module in modules):
            raise TypeError(f"ActivationMeter needs the modules whose parameters it shall not count, not {modules!r}.")
        self._weights = {p.untyped_storage()._cdata for module in modules for p in module.parameters()}
        self._users: dict[int, int] = {}  # storage: how many saved tensors lie in it
        self.now = self.peak = 0
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda kept: kept.tensor)

    def __enter__(self):
        self._hooks.__enter__()
        return self

    def __exit__(self, *error):
        self._hooks.__exit__(*error)

    def _pack(self, tensor):
        kept, memory = _Kept(tensor), tensor.untyped_storage()
        key, nbytes = memory._cdata, memory.nbytes()
        if key not in self._weights:
            if not self._users.get(key):
                self.now += nbytes
                self.peak = max(self.peak, self.now)
            self._users[key] = self._users.get(key, 0) + 1
            weakref.finalize(kept, self._release, key, nbytes)
        return kept

    def _release(self, key, nbytes) -> None:
        """Backward is through with a saved tensor."""
        self._users[key] -= 1
        if not self._users[key]:
            del self._users[key]
            self.now -= nbytes


class _Kept:
    """One saved tensor: it goes when the graph lets go of it."""

    def __init__(self, tensor):
        self.tensor = tensor
