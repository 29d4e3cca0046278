"""What the hand-written collectives share: who am I, cut a buffer into chunks, exchange two messages, add what arrived.

Buffers are contiguous tensors of any shape and dtype; they are used as one row of elements. Chunk r of a buffer belongs to rank r
of the group. Ranks are counted within the group.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

SUM = dist.ReduceOp.SUM
_COMBINE = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}


def position(group=None, root=0) -> tuple[int, int]:
    """(this rank, number of ranks), both within the group. ValueError if this rank is no member or `root` is none."""
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ValueError(f"Rank {dist.get_rank()} is not a member of this group: only its members may call its collectives.")
    if isinstance(root, bool) or not isinstance(root, int):
        raise TypeError(f"root is {root!r}, but must be a rank within the group, a whole number from 0 to {n - 1}.")
    if not 0 <= root < n:
        raise ValueError(f"root is {root}, but the group has {n} ranks: give one from 0 to {n - 1}, counted within the group.")
    return rank, n


def flat(x: torch.Tensor) -> torch.Tensor:
    """All elements of `x` as one row that shares its memory, without gradient. `x` must be contiguous."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"The buffer must be a tensor, not {x!r} (a {type(x).__name__}).")
    if not x.is_contiguous():
        raise ValueError(
            f"The buffer of shape {tuple(x.shape)} and stride {x.stride()} is not contiguous, so it cannot be sent as it lies in "
            "memory. Work on x.contiguous() and copy the result back."
        )
    return x.detach().view(-1)


def pieces(x: torch.Tensor, n: int) -> tuple[torch.Tensor, ...]:
    """`x` cut into n chunks that share its memory; the first ones are one element longer where n does not divide."""
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"x is to be cut into {n!r} parts, but that must be a whole number of 1 or more.")
    return flat(x).tensor_split(n)


def exchange(outgoing, to, incoming, source, group=None):
    """Send `outgoing` to rank `to` while receiving `incoming` from rank `source`: both are posted before either is waited for."""
    send = dist.P2POp(dist.isend, outgoing, group=group, group_peer=to)
    receive = dist.P2POp(dist.irecv, incoming, group=group, group_peer=source)
    for request in dist.batch_isend_irecv([send, receive]):
        request.wait()


def one_each(n: int, **lists) -> None:
    """ValueError unless each of `lists` is a list of n tensors, one for each rank of the group."""
    for name, tensors in lists.items():
        if not isinstance(tensors, (list, tuple)) or len(tensors) != n:
            raise ValueError(f"{name} must be a list of {n} tensors, one for each rank of the group, not {tensors!r}.")


def combine(x: torch.Tensor, incoming: torch.Tensor, op=SUM) -> None:
    """x = x op incoming, in place. `op`: a dist.ReduceOp whose result does not depend on the order (not AVG: divide the sum)."""
    if not isinstance(op, (dist.ReduceOp, dist.ReduceOp.RedOpType)) or op not in _COMBINE:
        names = ", ".join(str(known).split(".")[-1] for known in _COMBINE)
        raise ValueError(f"op is {op!r}, but must be a dist.ReduceOp, one of {names}. For a mean, divide the sum.")
    _COMBINE[op](x, incoming, out=x)


def distances(n: int) -> list[int]:
    """1, 2, 4, ... below n: ceil(log2 n) of them, one for each round of a binomial tree."""
    return [1 << k for k in range((n - 1).bit_length())]
