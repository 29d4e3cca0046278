"""Tensors that belong to operations in flight, and what may not be done to them before the wait.

What is being sent must not be written; what is being received must be neither read nor written. Nothing else in PyTorch
notices: the receiver silently gets the new values, or the program reads the old ones.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import _tensor_str

from .operators import tensors_in


def extent(tensor) -> tuple[int, int, int]:
    """(storage, first byte, last byte + 1) of a tensor; works for tensors without data too."""
    size = tensor.element_size()
    first = tensor.storage_offset() * size
    if tensor.numel() == 0:
        return tensor.untyped_storage()._cdata, first, first
    span = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride())) + 1
    return tensor.untyped_storage()._cdata, first, first + span * size


def written_by(func, args, kwargs) -> list:
    """The tensors that an operator changes, as its schema says."""
    changed = [a for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    if not changed:
        return []
    names = {a.name for a in changed}
    by_place = [value for argument, value in zip(func._schema.arguments, args) if argument.name in names]
    return list(tensors_in((by_place, [value for name, value in kwargs.items() if name in names])))


class Flight:
    """The buffers in flight, by storage. Handles are held weakly: a dropped handle must be noticed."""

    def __init__(self):
        self._rows: dict[int, list[tuple]] = {}  # storage -> (first byte, last byte + 1, whether it is written, handle)

    def __bool__(self) -> bool:
        return bool(self._rows)

    def add(self, handle, reads, writes) -> None:
        ref = weakref.ref(handle)
        for tensors, written in ((reads, False), (writes, True)):
            for tensor in tensors:
                storage, first, last = extent(tensor)
                self._rows.setdefault(storage, []).append((first, last, written, ref))

    def remove(self, handle) -> None:
        for storage, rows in list(self._rows.items()):
            rows[:] = [row for row in rows if row[3]() not in (handle, None)]
            if not rows:
                del self._rows[storage]

    def touched(self, reads, writes):
        """(handle, "read" | "written") for each operation in flight that these tensors get in the way of."""
        for tensors, what in ((writes, "written"), (reads, "read")):
            for tensor in tensors:
                storage, first, last = extent(tensor)
                for low, high, written, ref in tuple(self._rows.get(storage, ())):
                    handle = ref()
                    if handle is not None and first < high and last > low and (written or what == "written"):
                        yield handle, what


def watch_reads(look: Callable) -> None:
    """Call look(tensor, "print" | "tolist") before a tensor is printed or listed: no operator shows that to a dispatch mode."""
    shown, listed = _tensor_str._str, torch.Tensor.tolist

    def _str(self, *args, **kwargs):
        look(self, "print")
        return shown(self, *args, **kwargs)

    def tolist(self):
        look(self, "tolist")
        return listed(self)

    _tensor_str._str, torch.Tensor.tolist = _str, tolist
