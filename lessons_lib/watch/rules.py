"""What must agree between ranks, and the sentence that is shown where it does not."""

from __future__ import annotations

from ..errors import Mismatch, RunError

FIX = "All members of a group must call the same collectives, in the same order, with tensors of the same size and dtype."


def _tensor(op) -> str:
    return f"{list(op.shape)} {op.dtype}" if op.dtype else "no tensor"


def check_message(send, recv) -> RunError | None:
    """A message needs as many elements, of the same dtype, on both sides."""
    a, b = send.operation, recv.operation
    if (a.numel, a.dtype) == (b.numel, b.dtype):
        return None
    what = f"{a.numel} elements against {b.numel}" if a.numel != b.numel else f"{a.dtype} against {b.dtype}"
    return Mismatch(
        f"A message and its buffer differ: {what}.\n"
        f"  rank {send.rank} sends    {_tensor(a)} to rank {recv.rank} ({a.where})\n"
        f"  rank {recv.rank} receives {_tensor(b)} from rank {send.rank} ({b.where})\n"
        "What to do: make the receiver's buffer with the sender's shape and dtype. If another message was meant, look at the "
        "order: the first send from one rank to another meets the first receive with the same tag."
    )


def disagreement(members: dict) -> RunError | None:
    """Whether the ranks that have issued a collective (by rank) mean the same one; the lowest two that do not are named."""
    posts = [members[rank] for rank in sorted(members)]
    for n, post in enumerate(posts[1:], 1):
        if found := check_collective(posts[0], post, posts[:n]):
            return found
    return None


def check_collective(first, post, others) -> RunError | None:
    """`post` against the collective that `first` and the `others` have issued."""
    a, b = first.operation, post.operation
    if a.op != b.op:
        return _differ(first, post, "call different collectives", f"{a}", f"{b}", FIX)
    if a.peer != b.peer:
        roots = f"root rank {a.peer}", f"root rank {b.peer}"
        return _differ(first, post, f"name different roots for the same {a.op}", *roots, "Every rank must name the same root.")
    if a.dtype != b.dtype:
        return _differ(first, post, f"bring different dtypes to the same {a.op}", _tensor(a), _tensor(b), FIX)
    if a.op == "all_to_all":
        return _pieces(post, [*others, post])
    if a.numel != b.numel:
        what = f"bring different sizes to the same {a.op}"
        return _differ(first, post, what, _tensor(a), _tensor(b), FIX + _pad(a.op))
    if a.reduce != b.reduce:
        return _differ(first, post, f"ask for different reductions in the same {a.op}", a.reduce, b.reduce, FIX)
    return None


def _pad(op: str) -> str:
    return " Pieces of unequal size must be padded to the largest, or sent one by one." if "gather" in op or "scatter" in op else ""


def _differ(a, b, what: str, this: str, that: str, fix: str) -> Mismatch:
    one, two = sorted([(a, this), (b, that)], key=lambda x: x[0].rank)
    rows = "\n".join(f"  rank {p.rank}: {p.operation.op}, {text} ({p.operation.where})" for p, text in (one, two))
    return Mismatch(f"Ranks {one[0].rank} and {two[0].rank} {what}.\n{rows}\nWhat to do: {fix}")


def _pieces(post, others) -> RunError | None:
    """What each rank sends to another must be what that one expects from it."""
    group = post.operation.group
    for other in others:
        for a, b in ((post, other), (other, post)):
            sent = a.operation.splits[0][group.index(b.rank)]
            expected = b.operation.splits[1][group.index(a.rank)]
            if sent != expected:
                this, that = f"sends {sent} elements to rank {b.rank}", f"expects {expected} elements from rank {a.rank}"
                fix = "The output split sizes of one rank must be the input split sizes of the others."
                return _differ(a, b, "disagree about a piece of an all_to_all", this, that, fix)
    return None


def check_groups(calls: list[list[tuple]], ended=()) -> RunError | None:
    """The k-th new_group of every rank must name the same ranks; once all have ended, all must have called it equally often."""
    for turn in range(max(map(len, calls))):
        made = [(rank, *rows[turn]) for rank, rows in enumerate(calls) if len(rows) > turn]
        rank, ranks, line = made[0]
        other = next((m for m in made if m[1] != ranks), None)
        if other is not None:
            return Mismatch(
                f"Rank {rank} calls new_group({list(ranks)}) ({line}), while rank {other[0]} calls new_group({list(other[1])}) "
                f"({other[2]}). Every rank must call new_group, with the same list of ranks and in the same order, also ranks that "
                "are not members. Move the call out of the `if`."
            )
        absent = [r for r in ended if len(calls[r]) <= turn]
        if absent:
            return Mismatch(
                f"Rank {rank} called new_group({list(ranks)}) ({line}), but rank {', '.join(map(str, absent))} did not. Every rank "
                "must call new_group, also ranks that are not members. Move the call out of the `if`."
            )
    return None


def order_warning(posts: list) -> str | None:
    """Ranks that reach one collective from different lines may have swapped two of them; gloo cannot tell."""
    by_line: dict[str, list] = {}
    for post in posts:
        if post.operation.direct and post.operation.op != "barrier":
            by_line.setdefault(post.operation.where, []).append(post)
    if len(by_line) < 2:
        return None
    root = posts[0].operation.peer
    if root >= 0:
        # root and others often call from two branches of an `if`: look twice only where they name different tensors
        told = {}
        for line, there in by_line.items():
            told.setdefault(_first_argument(line), there[0])
        if len(told) < 2:
            return None
    one, two = (there[0] for there in list(by_line.values())[:2])
    return (
        f"This {one.operation.op} was called from {one.operation.where} on rank {one.rank} and from {two.operation.where} on rank "
        f"{two.rank}. If the two lines mean different tensors, their values were mixed without an error: call collectives in the "
        "same order on every rank, best from the same line."
    )


def _first_argument(line: str) -> str:
    """The text of the first argument in a source line like "cell 3, line 5: dist.broadcast(a, src=0)"."""
    call = line.partition(": ")[2].partition("(")[2]
    return call.split(",")[0].split(")")[0].strip()
