"""What travels: the program with its arguments to the ranks, results back. Everything goes by value, through cloudpickle.

Ranks never import the learner's main program, so a script needs no `if __name__ == "__main__"`. Functions and classes of
a notebook, of a main program and of a test travel as they are now. Other modules of the learner are imported by the
ranks, unless their file has changed since this library was imported: then they travel too, as the notebook knows them.
"""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import inspect
import io
import os
import pickle
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle

from .. import sources

_STARTED = time.time()
_registry = threading.Lock()  # cloudpickle's list of modules to send by value belongs to the whole process
_NODES = 20_000  # objects looked at, at most, to find the one that cannot be sent


def pack(program: Callable, args: tuple, kwargs: dict) -> bytes:
    """The call as bytes. TypeError names the variable that cannot be sent, where it is used, and what to do."""
    call = (program, args, kwargs)
    with _registry:
        modules = [m for m in _user_modules() if m.__name__ not in cloudpickle.list_registry_pickle_by_value()]
        try:
            for module in modules:
                cloudpickle.register_pickle_by_value(module)
            return _dumps(call)
        except Exception as by_value:
            problem: Exception = by_value
        finally:
            for module in modules:
                cloudpickle.unregister_pickle_by_value(module)
        if modules:  # the ranks may still be able to import them
            try:
                return _dumps(call)
            except Exception as by_reference:
                problem = by_reference
    raise TypeError(_explain(call, problem))


def unpack(data: bytes) -> tuple[Callable, tuple, dict]:
    """In a rank: the call. Classes that came along are put where a plain `pickle` of their instances looks for them."""
    call = pickle.loads(data)
    main = sys.modules["__main__"]
    for cls in list(getattr(cloudpickle.cloudpickle, "_DYNAMIC_CLASS_TRACKER_BY_CLASS", ())):
        if cls.__module__ == "__main__" and "<locals>" not in cls.__qualname__:
            vars(main).setdefault(cls.__qualname__, cls)
    program = inspect.unwrap(call[0]) if inspect.isfunction(call[0]) else call[0]
    if inspect.isfunction(program) and program.__module__ == "__main__" and "<locals>" not in program.__qualname__:
        vars(main).setdefault(program.__qualname__, program)
    return call


def write_result(path: str, log: Any, result: Any) -> None:
    """In a rank. TypeError names what in the result cannot be sent."""
    try:
        with open(path, "wb") as file:
            _Pickler(file).dump((log, result))
    except Exception as problem:
        guilty = _culprit(result, "the result")
        where, value = guilty or ("the result", result)
        raise TypeError(
            f"what the program returned cannot be sent back: {where} is {_kind(value)} "
            f"({type(problem).__name__}: {_short(problem)}). What to do: return tensors, numbers, strings, or lists and "
            "dictionaries of them; for a sharded tensor its .to_local()."
        ) from None


def read_result(path: str) -> tuple[Any, Any]:
    """In the launcher: (log, result)."""
    with open(path, "rb") as file:
        return pickle.load(file)


class _Pickler(cloudpickle.Pickler):
    """cloudpickle, but code keeps the name of its file or cell (for tracebacks), tensors take only the bytes that they
    show, and a tensor without data keeps its shape."""

    def reducer_override(self, obj):
        if isinstance(obj, types.CodeType):
            make, parts = self.dispatch_table[types.CodeType](obj)
            return make, tuple(obj.co_filename if part == "<dynamic-code>" else part for part in parts)
        if isinstance(obj, types.ModuleType) and type(obj) is not types.ModuleType and sys.modules.get(obj.__name__) is obj:
            return importlib.import_module, (obj.__name__,)  # this package and torch.ops are modules of a class of their own
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(obj, torch.Tensor):
            smaller = _to_send(torch, obj)
            if smaller is not obj:
                return _identity, (smaller,)
        return super().reducer_override(obj)


def _identity(value):
    return value


def _to_send(torch, tensor):
    fake = sys.modules.get("torch._subclasses.fake_tensor")
    if fake is not None and isinstance(tensor, fake.FakeTensor):
        meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        return torch.nn.Parameter(meta, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else meta
    if type(tensor) is torch.Tensor and tensor.device.type == "cpu" and tensor.layout == torch.strided:
        if tensor.untyped_storage().nbytes() > 2 * tensor.numel() * tensor.element_size() + 1024:  # a view of more
            return tensor.detach().clone().requires_grad_(tensor.requires_grad)
    return tensor


def _dumps(value: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


def _user_modules() -> Iterator[types.ModuleType]:
    """The learner's modules that must travel."""
    for name, module in list(sys.modules.items()):
        ours = name in ("__main__", "__mp_main__") or name.partition(".")[0] == __package__
        file = getattr(module, "__file__", None)
        if ours or not isinstance(module, types.ModuleType) or getattr(module, "__name__", "") != name:
            continue
        if isinstance(file, str) and file.endswith(".py") and sources.is_user_code(file) and _must_travel(name, module, file):
            yield module


def _must_travel(name: str, module: types.ModuleType, file: str) -> bool:
    """Changed since, rewritten by pytest, or not to be found by name."""
    rewritten = type(getattr(module, "__loader__", None)).__module__.startswith("_pytest")
    return rewritten or _changed(file) or not _importable(name, file)


def _changed(file: str) -> bool:
    try:
        return os.stat(file).st_mtime >= _STARTED
    except OSError:
        return True


def _importable(name: str, file: str) -> bool:
    package, _, _ = name.rpartition(".")
    if package and package not in sys.modules:
        return False
    try:
        path = getattr(sys.modules[package], "__path__", None) if package else None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
    except (ImportError, ValueError, AttributeError):
        return False
    return spec is not None and spec.origin == file


# ---- what cannot be sent, by name ------------------------------------------------------------------------------------


def _explain(call: tuple, problem: Exception) -> str:
    program, args, kwargs = call
    name = getattr(program, "__name__", type(program).__name__)
    places = [(program, f"the program {name}")]
    places += [(value, f"argument {i + 1} of the program") for i, value in enumerate(args)]
    places += [(value, f"argument {key}= of the program") for key, value in kwargs.items()]
    for value, path in places:
        guilty = _culprit(value, path)
        if guilty:
            return (
                f"run() cannot send this to the ranks: {guilty[0]} is {_kind(guilty[1])}, which belongs to this process "
                f"alone ({type(problem).__name__}: {_short(problem)}). What to do: create it inside the program, so that "
                "every rank has its own, or pass plain data (numbers, strings, lists, tensors) instead."
            )
    return f"run() cannot send the program to the ranks: {type(problem).__name__}: {_short(problem)}"


def _culprit(value: Any, path: str) -> tuple[str, Any] | None:
    """The deepest part of `value` that cannot be pickled, with the way to it in words; None if all of it can."""
    seen: set[int] = set()

    def search(value, path):
        if id(value) in seen or len(seen) > _NODES or _sendable(value):
            return None
        seen.add(id(value))
        for part, where in _parts(value, path):
            guilty = search(part, where)
            if guilty:
                return guilty
        return path, value

    try:
        return search(value, path)
    except RecursionError:
        return path, value


def _sendable(value: Any) -> bool:
    try:
        _dumps(value)
    except Exception:
        return False
    return True


def _parts(value: Any, path: str) -> Iterator[tuple[Any, str]]:
    if isinstance(value, functools.partial):
        yield value.func, path
        yield from _parts(list(value.args), f"the arguments in {path}")
        yield from _parts(dict(value.keywords), f"the arguments in {path}")
    elif inspect.ismethod(value):
        yield value.__func__, path
        yield value.__self__, f"the object that {path} belongs to"
    elif inspect.isfunction(value):
        yield from _function_parts(value)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield item, f"entry {key!r} of {path}"
    elif isinstance(value, (list, tuple, set, frozenset)):
        for i, item in enumerate(value):
            yield item, f"item {i} of {path}"
    elif isinstance(value, type):
        for name, item in vars(value).items():
            item = getattr(item, "__func__", item)
            if not name.startswith("__") or inspect.isfunction(item):
                yield item, f"`{value.__name__}.{name}`"
    else:
        for name, item in getattr(value, "__dict__", {}).items():
            yield item, f"`.{name}` of {path}"
        if type(value).__module__ == "__main__":
            yield type(value), f"the class {type(value).__name__}"


def _function_parts(function: types.FunctionType) -> Iterator[tuple[Any, str]]:
    code = function.__code__
    home = f"used by {function.__name__}() ({sources.title(code.co_filename)}, line {code.co_firstlineno})"
    for name, cell in zip(code.co_freevars, function.__closure__ or ()):
        try:
            yield cell.cell_contents, f"the variable `{name}` {home}"
        except ValueError:  # not assigned yet
            continue
    signature = inspect.signature(function, follow_wrapped=False)
    for parameter in signature.parameters.values():
        if parameter.default is not parameter.empty:
            yield parameter.default, f"the default value of `{parameter.name}` in {function.__name__}()"
    for name in _global_names(code):
        if name in function.__globals__:
            yield function.__globals__[name], f"the variable `{name}` {home}"
    for name, item in vars(function).items():
        yield item, f"`{function.__name__}.{name}`"


def _global_names(code: types.CodeType) -> list[str]:
    names = list(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names += _global_names(constant)
    return list(dict.fromkeys(names))


def _kind(value: Any) -> str:
    kind = type(value)
    if inspect.isgenerator(value):
        return "a generator"
    if isinstance(value, io.IOBase):
        return f"an open file ({getattr(value, 'name', kind.__name__)!r})"
    if kind.__module__ in ("_thread", "threading") and "lock" in kind.__name__.lower():
        return "a lock"
    module = "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}."
    return f"an object of type {module}{kind.__qualname__}"


def _short(problem: Exception) -> str:
    text = str(problem).strip().replace("\n", " ")
    return text if len(text) <= 200 else text[:200] + " ..."
