"""What autograd keeps of a forward for its backward, in bytes: asked by hooks, not by a formula."""

from __future__ import annotations

import torch
from torch import nn


def saved_bytes(module: nn.Module, x: torch.Tensor) -> int:
    """Bytes of all memory that module(x) leaves for its backward on this rank. Parameters are not counted.

    Memory that several tensors share, such as views of one, counts once, and whole. Runs forward once. x counts if it is kept.
    """
    if not isinstance(module, nn.Module) or not isinstance(x, torch.Tensor):
        wrong, what = (module, "module must be an nn.Module") if not isinstance(module, nn.Module) else (x, "x must be a tensor")
        raise TypeError(f"{what}, not {wrong!r} (a {type(wrong).__name__}).")
    return sum(memory.nbytes() for memory in saved_memory(module, x))


def saved_memory(module, x):
    weights = {p.untyped_storage()._cdata for p in module.parameters()}
    kept = {}

    def keep(tensor):
        memory = tensor.untyped_storage()
        if memory._cdata not in weights:
            kept[memory._cdata] = memory
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        module(x)
    return list(kept.values())
