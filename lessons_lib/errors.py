"""What can go wrong in a distributed program, each kind with a name and an explanation.

Ground floor: nothing here imports torch, so that a saved recording is explained by the same words as a live run.
"""

from __future__ import annotations

from dataclasses import dataclass


class RunError(RuntimeError):
    """A program on several ranks could not finish. The message says which rank, which operation, which line."""


class RankFailed(RunError):
    """A rank raised an exception, died, or did not answer in time."""


class Deadlock(RunError):
    """Ranks wait for something that cannot come; the message says who waits for whom."""


class Mismatch(RunError):
    """Ranks disagree about an operation: its kind, size, dtype, or who takes part."""


class BufferMisuse(RunError):
    """A tensor was handed over in a way that loses data: non-contiguous, changed before wait, handle dropped."""


class OrderWarning(UserWarning):
    """Ranks reached the same collective from different lines; values may be mixed without an error."""


@dataclass(frozen=True)
class Wait:
    """One rank that cannot go on: `rank` does `what` at `line`, and needs each of `needs` to do `missing`."""

    rank: int
    what: str  # "recv from rank 1"
    line: str  # "cell 3, line 5: dist.recv(x, 1)"
    needs: tuple[int, ...]
    missing: str  # "a send to rank 0 by rank 1", "all_reduce by every member"
    sends: bool = False  # whether `what` is a send: two that both send first get advice of their own


def deadlock_message(waits: list[Wait], ended: set[int] | frozenset[int] = frozenset()) -> str:
    """The sentence shown for a deadlock: who waits for whom, at which line, and what to change.

    `waits` are the ranks that are stuck, `ended` the ranks whose program has returned.
    """
    doing = {wait.rank: wait.what for wait in waits}
    rows = []
    for wait in sorted(waits, key=lambda w: w.rank):
        # name those first who will never come: they have ended, or are stuck themselves
        who = sorted(wait.needs, key=lambda r: (r not in ended, r not in doing, r))
        shown = ", ".join(f"rank {r} {_state(r, doing, ended)}" for r in who[:3])
        more = f", and {len(who) - 3} more ranks have not come" if len(who) > 3 else ""
        rows.append(f"  rank {wait.rank} waits in {wait.what} ({wait.line}); it needs {wait.missing}, but {shown}{more}")
    return "\n".join(["These ranks wait for something that cannot come:", *rows, _advice(waits, ended)])


def _state(rank: int, doing: dict[int, str], ended) -> str:
    return "has finished" if rank in ended else f"waits in {doing[rank]}" if rank in doing else "has not come"


def _advice(waits: list[Wait], ended: set[int] | frozenset[int]) -> str:
    senders = {w.rank for w in waits if w.sends}
    both_send = {(w.rank, other) for w in waits if w.sends for other in set(w.needs) & senders}
    if both_send:
        # two even partners would both send first again; in a ring, parity helps
        alike = any((b, a) in both_send and (a - b) % 2 == 0 for a, b in both_send)
        order = "of two partners the lower rank sends, the other receives" if alike else "even ranks send, odd ranks receive"
        return (
            "What to do: a blocking send returns only when its message is received, so two ranks that both send first "
            f"wait for ever. Let one side receive first ({order}, then the other way round), "
            "or use dist.isend and wait after the receive."
        )
    if any(set(w.needs) & set(ended) for w in waits):
        return (
            "What to do: every send needs exactly one matching receive (same two ranks, same group, same tag), and every "
            "collective must be called by all members of its group. Look for the call that is missing on the rank that finished."
        )
    return (
        "What to do: follow the circle above and change the order on one of these ranks, so that somebody's partner is "
        "already there; with dist.isend / dist.irecv a rank can post both before it waits for either."
    )
