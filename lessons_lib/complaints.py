"""The sentences for tensors and handles that were used wrongly: which rank, which line, and what to do instead."""

from __future__ import annotations

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
