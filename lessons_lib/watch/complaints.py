"""The sentences for tensors and handles that were used wrongly: which rank, which line, and what to do instead."""

from __future__ import annotations

# what PyTorch says where a tensor without data is read: words of the message, names of the class
NO_DATA = (
    "not supported for tensor subclasses",
    "data is not allocated yet",
    "Cannot access data pointer",
    "local object 'WeakValueDictionary",
)
NEEDS_DATA = {"DataDependentOutputException", "DynamicOutputShapeException", "UnsupportedFakeTensorException"}
INITIALISED_TWICE = (
    "run() has initialised torch.distributed already. Leave dist.init_process_group out, or write `if not dist.is_initialized():` "
    "before it; then the same program also runs under torchrun."
)


def not_contiguous(rank: int, name: str, tensor, where: str) -> str:
    return (
        f"Rank {rank} handed dist.{name} a tensor that is not contiguous (shape {list(tensor.shape)}, strides "
        f"{list(tensor.stride())}) at {where}. Its neighbours in memory would be read and written instead. Nothing was moved. "
        f"Make it contiguous, communicate the copy, and copy back: c = x.contiguous(); dist.{name}(c, ...); x.copy_(c)."
    )


def shared_memory(rank: int, name: str, where: str, kind: str) -> str:
    if kind == "outputs":
        what = "a list of outputs in which two tensors share their memory: one piece would overwrite another"
        fix = "[torch.zeros(k)] * n is n times the same tensor; write [torch.zeros(k) for _ in range(n)]."
    else:
        what = "an output that shares its memory with the input, which would be overwritten while it is read"
        fix = "Give it an output of its own: torch.empty_like(x)."
    return f"Rank {rank} handed dist.{name} {what} ({where}). Nothing was moved. {fix}"


def dropped(rank: int, name: str, where: str) -> str:
    return (
        f"Rank {rank} threw away the handle of the {name} that it started at {where}, without waiting for it. Without its handle "
        "the operation may never happen. Keep what dist.isend, dist.irecv and async_op=True return in a list, and call wait() on "
        "each."
    )


def never_waited(rank: int, open_ones: list[tuple[str, str]]) -> str:
    (name, where), *rest = open_ones
    more = f" (and {len(rest)} more operations)" if rest else ""
    return (
        f"Rank {rank} ended before it waited for the {name} that it started at {where}{more}. Without the wait the operation may "
        "never happen. Keep the handle and call wait() on it before the program returns."
    )


def in_flight(rank: int, name: str, where: str, misuse: str) -> str:
    return (
        f"Rank {rank} used the tensor of its {name} while it was in flight: {misuse}. The operation was started at {where}; until "
        "its wait() the tensor belongs to it: what is sent must not be written, what is received must be neither read nor written. "
        "Wait first, or hand over a copy: tensor.clone()."
    )


def no_data(rank: int, where: str, operator: str) -> str:
    return (
        f"Rank {rank} wants to read a value at {where} ({operator}), but with shapes_only=True tensors have shapes and no data. So "
        "no .item(), .tolist(), .numpy(), float(), bool() or `if tensor:`, and no masks or nonzero(), whose shapes depend on "
        "values. Leave the reading out, or run a smaller size with shapes_only=False."
    )


def no_such_rank(rank: int, size: int) -> str:
    return f"There is no rank {rank} in this group of {size}: its ranks are 0 to {size - 1}."


def to_itself(rank: int) -> str:
    return (
        f"Rank {rank} sends to, or receives from, itself. A message goes from one rank to another: inside a rank, copy the tensor "
        "(y.copy_(x)), and leave the own rank out of loops over all ranks (`if other != dist.get_rank()`)."
    )


def cannot_look_into(rank: int, name: str, layout: str, where: str) -> str:
    return (
        f"Rank {rank} handed dist.{name} a tensor of layout {layout} at {where}. Only dense tensors (torch.strided) can be "
        "followed and recorded. Communicate x.to_dense(), or its indices and values one after the other."
    )
