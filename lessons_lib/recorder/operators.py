"""Counts what every PyTorch operator costs: floating-point operations, and bytes read and written.

A dispatch mode sees each operator on this thread, also those that autograd and C++ code issue. What a call with the
same shapes cost is remembered, so that the look at its tensors is paid once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from ..recording import Operator

aten = torch.ops.aten
ENTER = {torch.ops.profiler._record_function_enter_new.default, torch.ops.profiler._record_function_enter.default}
EXIT = {torch.ops.profiler._record_function_exit._RecordFunction, torch.ops.profiler._record_function_exit.default}
PLAIN = {torch.Tensor, torch.nn.Parameter, FakeTensor}
# these ask about a tensor and touch no data; they must not be decomposed or counted
QUESTIONS = {
    "sym_is_contiguous", "is_contiguous", "is_strides_like_format", "is_non_overlapping_and_dense", "size", "sym_size", "stride",
    "sym_stride", "storage_offset", "sym_storage_offset", "numel", "sym_numel", "dim", "layout", "device",
}  # fmt: skip
# allocating is not reading or writing: the values come from whoever fills them
FREE = {"is_pinned", "empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "resize_", "set_", "record_stream"}
# these write their first argument without reading it
OVERWRITES = {"copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "random_", "exponential_"}

_kind: dict = {}  # operator -> "view" | "free" | "question" | "collective" | "plain"
_cost: dict = {}  # (operator, shapes) -> Operator


def tensors_in(values):
    """All tensors in (nested) arguments, in order."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)
        elif isinstance(value, dict):
            yield from tensors_in(value.values())


def _shapes(value):
    """Arguments with each tensor replaced by its shape and dtype: calls with the same ones cost the same."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype
    if isinstance(value, (list, tuple)):
        return tuple([_shapes(v) for v in value])
    return value


def kind_of(func) -> str:
    """Whether an operator makes a view (moves nothing), allocates only, asks a question, communicates, or does work."""
    kind = _kind.get(func)
    if kind is None:
        name, schema = func._overloadpacket.__name__, func._schema
        if func.namespace in ("_c10d_functional", "c10d", "_dtensor"):
            kind = "collective"
        elif name in QUESTIONS:
            kind = "question"
        elif name in FREE:
            kind = "free"
        else:
            returns = [r.alias_info for r in schema.returns]
            aliases = bool(returns) and all(a is not None and not a.is_write for a in returns)
            kind = "view" if aliases or name in ("detach", "alias", "_unsafe_view") else "plain"
        _kind[func] = kind
    return kind


def _made_of_others(func) -> bool:
    """Composite operators arrive whole under inference_mode; elsewhere autograd has taken them apart."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def _flops(func, args, kwargs, out) -> int:
    packet = func._overloadpacket
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=out))
    if packet is getattr(aten, "_scaled_dot_product_flash_attention_for_cpu", None):
        return int(sdpa_flop_count(args[0].shape, args[1].shape, args[2].shape))
    if packet is getattr(aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None):
        return int(sdpa_backward_flop_count(*(a.shape for a in args[:4])))
    return 0


def cost_of(func, args, kwargs, out) -> Operator:
    """FLOPs as PyTorch's flop_registry counts them; bytes of all tensors read, and of all written."""
    name = func._overloadpacket.__name__
    inputs = (args[1:] if name in OVERWRITES else args, {k: v for k, v in kwargs.items() if k != "out"})
    read = sum(t.numel() * t.element_size() for t in tensors_in(inputs))
    written = sum(t.numel() * t.element_size() for t in tensors_in((out,)))
    return Operator(name, _flops(func, args, kwargs, out), read + written)


class OperatorCounter(TorchDispatchMode):
    """Calls `count(Operator)` for every operator that does work, and `enter(name)` / `leave()` around record_function.

    Where they are set: `before(func, args, kwargs)` is called first (it watches buffers in flight), `explain(func, error)`
    may give a better error, and `functional(func, args, out)` gets DTensor's collectives, which are not operators.
    """

    def __init__(self, count: Callable, enter: Callable, leave: Callable):
        super().__init__()
        self.count, self.enter, self.leave = count, enter, leave
        self.before: Callable | None = None
        self.explain: Callable | None = None
        self.functional: Callable | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # PyTorch would wrap the method below in a guard against its compiler, and load the compiler for it

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if types and not PLAIN.issuperset(types):
            return NotImplemented  # DTensor and its like: let it split the call, then see the parts
        kwargs = kwargs or {}
        if func in ENTER:
            self.enter(args[0])
            return func(*args, **kwargs)
        if func in EXIT:
            self.leave()
            return func(*args, **kwargs)
        kind = kind_of(func)
        if kind == "question":
            return NotImplemented
        if kind == "collective":
            out = func(*args, **kwargs)
            if self.functional is not None:
                self.functional(func, args, out)
            return out
        if kind == "plain":
            if self.before is not None:
                self.before(func, args, kwargs)
            key = (func, _shapes(args), _shapes(tuple(kwargs.items())))
            known = _cost.get(key)
            if known is None:
                if func._overloadpacket not in flop_registry and _made_of_others(func):
                    with self:  # counted part by part
                        return func.decompose(*args, **kwargs)
                out = self._call(func, args, kwargs)
                known = _cost[key] = cost_of(func, args, kwargs, out)
                self.count(known)
                return out
            self.count(known)
        return self._call(func, args, kwargs)

    def _call(self, func, args, kwargs):
        try:
            return func(*args, **kwargs)
        except Exception as error:
            better = self.explain(func, error) if self.explain else None
            if better is None:
                raise
            raise better from None
