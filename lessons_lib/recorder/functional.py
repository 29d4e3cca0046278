"""DTensor's collectives where tensors have no data.

DTensor calls torch.ops._c10d_functional; with data these reach the process group and are recorded there. Without data
PyTorch works out their shapes alone and never asks the group, so that they are recorded from the operator itself.
"""

from __future__ import annotations

import functools
import types

import torch
from torch.distributed import device_mesh
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes

from .group import flat, nbytes

KINDS = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
}


class FunctionalCollectives:
    """Called with each operator of that family after its shapes are known; keeps what has not been waited for."""

    def __init__(self, recorder):
        self.recorder, self._open = recorder, {}

    def __call__(self, func, args, out) -> None:
        name = func._overloadpacket.__name__
        if name == "wait_tensor":
            handle = self._open.pop(args[0].untyped_storage()._cdata, None)
            if handle is not None:
                handle.wait()
            return
        kind = KINDS.get(name.removesuffix("_out").removesuffix("_").removesuffix("_coalesced"))
        if kind is None:
            return
        group = c10d._resolve_process_group(args[-1])
        reduce = args[1].upper() if kind in ("all_reduce", "reduce_scatter") else ""
        root = group.ranks[args[1]] if kind == "broadcast" else -1
        for given, made in zip(flat(args[0]), flat(out)):
            whole = made if kind == "all_gather" else given
            facts = {"reduce": reduce, "peer": root, "nbytes": nbytes([whole])}
            if kind == "all_to_all":
                row = given.numel() // max(1, given.shape[0])
                facts["splits"] = tuple(tuple(s * row for s in sizes) for sizes in (args[2], args[1]))
            handle = self.recorder.post(kind, group, [], [made], numel=given.numel(), issue=lambda: None, **facts)
            self._open[made.untyped_storage()._cdata] = handle


def keep_meshes_real() -> None:
    """Device meshes compute with small tensors of rank numbers and read their values: let those have data."""
    for name, method in list(vars(DeviceMesh).items()):
        if isinstance(method, types.FunctionType):
            setattr(DeviceMesh, name, _with_data(method))
        elif isinstance(method, staticmethod):
            setattr(DeviceMesh, name, staticmethod(_with_data(method.__func__)))
        elif isinstance(method, property):
            setattr(DeviceMesh, name, property(_with_data(method.fget)))
    device_mesh.torch = _Torch()


class _Torch:
    """What device_mesh knows as torch: the tensors that it makes have data, whatever mode is on."""

    def __getattr__(self, name):
        value = getattr(torch, name)
        return _with_data(value) if name in ("tensor", "arange") else value


def allow_conversions() -> None:
    """Let module.to(dtype) exchange parameters that FakeTensorMode holds weakly: its notes on them hold no data."""
    torch.utils.weakref = types.SimpleNamespace(getweakrefs=lambda tensor: [])


def _with_data(function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        with _disable_current_modes():
            return function(*args, **kwargs)

    return call
