"""Whether the tensors that one rank hands to a collective fit each other, seen before gloo gets them.

gloo's own words for these do not say what to do, some are fatal checks written to the terminal, and an all_to_all whose
length cannot be divided reads beyond its tensors without any error.
"""

from __future__ import annotations

import math

import torch

from ..errors import BufferMisuse
from ..watch import complaints
from .flight import extent


def _text(tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _alike(a, b) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype


def check_dense(rank: int, name: str, tensors, where: str) -> None:
    """gloo moves a tensor's bytes from first to last: they must be its own, without holes and in order."""
    for tensor in tensors:
        if tensor.layout != torch.strided:
            raise ValueError(complaints.cannot_look_into(rank, name, str(tensor.layout), where))
        if not tensor.is_contiguous():
            raise BufferMisuse(complaints.not_contiguous(rank, name, tensor, where))


def check_list(op: str, side: str, tensors, like, n: int) -> None:
    """gather, scatter, all_gather: a list of one tensor for each of `n` ranks, each like this rank's own tensor."""
    _check_length(op, side, tensors, n)
    for i, tensor in enumerate(tensors):
        if not _alike(tensor, like):
            raise ValueError(
                f"dist.{op}: tensor {i} of the {side} list is {_text(tensor)}, but this rank's own tensor is {_text(like)}. All "
                f"must have the same shape and dtype: [torch.empty_like(x) for _ in range({n})]."
            )


def _check_length(op: str, side: str, tensors, n: int) -> None:
    if len(tensors) != n:
        raise ValueError(f"dist.{op}: the {side} list has {len(tensors)} tensors, but needs {n}, one for each rank of the group.")


def shared(outputs, inputs=()) -> str:
    """Whether two outputs share memory ("outputs"), or an output and an input ("input"); "" if every tensor is apart.

    Tensors that are not contiguous are left out: they are refused as such.
    """
    both = ((outputs, True), (inputs, False))
    rows = [(*extent(t), written) for tensors, written in both for t in tensors if t.numel() and t.is_contiguous()]
    ends: dict = {}  # (storage, whether it is an output) -> the last byte seen so far
    for storage, first, last, written in sorted(rows):
        if first < ends.get((storage, not written), 0):
            return "input"
        if written and first < ends.get((storage, True), 0):
            return "outputs"
        ends[storage, written] = max(last, ends.get((storage, written), 0))
    return ""


def check_gathered(op: str, output, input, n: int) -> None:
    """all_gather_into_tensor: the output is `n` inputs joined along the first dimension."""
    if input.dim() == 0 or not _fits(output, input, n):
        raise ValueError(_whole_and_part(op, "output", output, "input", input, n))


def check_scattered(op: str, output, input, n: int) -> None:
    """reduce_scatter_tensor: the input is `n` outputs joined along the first dimension."""
    if output.dim() == 0 or not _fits(input, output, n):
        raise ValueError(_whole_and_part(op, "input", input, "output", output, n))


def _fits(whole, part, n: int) -> bool:
    return whole.dtype == part.dtype and tuple(whole.shape) == (n * part.shape[0], *part.shape[1:])


def _whole_and_part(op, a, whole, b, part, n) -> str:
    wanted = [n * part.shape[0], *part.shape[1:]] if part.dim() else None
    rule = (
        f"Over {n} ranks the {a} must be {wanted} {str(part.dtype).removeprefix('torch.')}: the first dimension {n} times that of "
        f"the {b}, the others alike, and the same dtype."
        if wanted
        else f"A tensor without dimensions cannot be cut or joined: use x.view(1) for the {b}."
    )
    return f"dist.{op}: the {a} is {_text(whole)} and the {b} is {_text(part)}. {rule}"


def check_reduced(op: str, output, inputs, rank: int, n: int) -> None:
    """reduce_scatter of a list: this rank keeps the sum of the tensors at place `rank`."""
    _check_length(op, "input", inputs, n)
    if not _alike(output, inputs[rank]):
        raise ValueError(
            f"dist.{op}: this rank receives the sum of the tensors at place {rank} of the input lists, which here is "
            f"{_text(inputs[rank])}, but its output is {_text(output)}. Both must have the same shape and dtype."
        )


def check_exchanged(op: str, outputs, inputs, n: int) -> None:
    """all_to_all of lists: one tensor for each rank, and gloo wants all of one shape."""
    for side, tensors in (("output", outputs), ("input", inputs)):
        _check_length(op, side, tensors, n)
        for i, tensor in enumerate(tensors):
            if not _alike(tensor, inputs[0]):
                raise ValueError(
                    f"dist.{op}: tensor {i} of the {side} list is {_text(tensor)}, and tensor 0 of the input list is "
                    f"{_text(inputs[0])}. All must have the same shape and dtype. For pieces of different sizes use "
                    "dist.all_to_all_single(output, input, output_split_sizes, input_split_sizes)."
                )


def pieces(op: str, side: str, tensor, sizes, n: int) -> tuple[int, ...]:
    """all_to_all_single: elements of each rank's piece, cut along the first dimension."""
    rows = tensor.shape[0] if tensor.dim() else 0
    if tensor.dim() == 0:
        raise ValueError(f"dist.{op}: the {side} has no dimensions and cannot be cut into {n} pieces: use x.view(1).")
    if sizes:
        if len(sizes) != n or sum(sizes) != rows or min(sizes) < 0:
            raise ValueError(
                f"dist.{op}: the {side} split sizes are {list(sizes)}. There must be {n}, one for each rank, and their sum must be "
                f"{rows}, the first dimension of the {side} ({_text(tensor)})."
            )
    elif rows % n:
        raise ValueError(
            f"dist.{op}: the {side} is {_text(tensor)}, and {rows} cannot be cut into {n} equal pieces. Pad it to a multiple of "
            f"{n}, or say how many go to each rank: all_to_all_single(output, input, output_split_sizes, input_split_sizes)."
        )
    row = math.prod(tensor.shape[1:])
    return tuple(int(s) * row for s in sizes) if sizes else (rows // n * row,) * n
