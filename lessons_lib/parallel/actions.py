"""What a pipeline's rank does, as data: actions, and for every rank the order in which it runs them.

    Action("F", 3)     "F3"    forward of microbatch 3
    Action("B", 0)     "B0"    its backward; where an order holds W too, B is the gradient of the input alone
    Action("W", 0)     "W0"    the gradient of the weights [arXiv:2401.10241]
    Action("F", 2, 1)  "F2.1"  the same of chunk 1, where a rank holds several pieces of the model

Orders are a list with one list of actions for each rank. A model cut into p x v stages lies on p ranks so that chunk c of rank r is
stage c x p + r [arXiv:2104.04473, section 2.2]. Pure Python: what is here also draws and checks schedules where torch is missing.
"""

from __future__ import annotations

import re
from collections import Counter
from math import inf
from numbers import Integral, Rational, Real
from typing import NamedTuple

KINDS = {"F": "forward", "B": "backward", "W": "weight gradient"}
MOST = {"ranks": 1024, "microbatches": 65_536, "chunks": 1024}
MOST_ACTIONS = 1_000_000
LONGEST = 1e100  # any time: a sum of such is finite


class ScheduleError(ValueError):
    """A schedule that cannot run; the message says which rank, which action, and why."""


class Action(NamedTuple):
    """What a rank does at once: `kind` "F", "B" or "W" of one microbatch, in one chunk of the model. Both count from 0."""

    kind: str
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")


def action(text) -> Action:
    """ "F3" or "B2.1" as an Action; an Action, or (kind, microbatch, chunk), is checked and handed back."""
    if isinstance(text, str):
        found = re.fullmatch(r"([FBW])(\d{1,6})(?:\.(\d{1,6}))?", text.strip())
        if not found:
            raise ScheduleError(
                f"{text!r} is not an action: write F, B or W and the number of the microbatch, such as F3, B0 or W2; "
                "for a chunk other than 0 add its number, such as F2.1."
            )
        return Action(found[1], int(found[2]), int(found[3] or 0))
    if not isinstance(text, (tuple, list)) or not 2 <= len(text) <= 3:
        raise ScheduleError(f"{text!r} is not an action: give text such as 'F3', or Action('F', 3).")
    made = Action(*text)
    if made.kind not in KINDS:
        raise ScheduleError(f"The kind of an action is {made.kind!r}, but must be 'F', 'B' or 'W'.")
    microbatch = whole(made.microbatch, f"The microbatch of {made.kind}", 0, MOST["microbatches"] - 1)
    return Action(made.kind, microbatch, whole(made.chunk, f"The chunk of {made.kind}{microbatch}", 0, MOST["chunks"] - 1))


def orders_from(rows) -> list[list[Action]]:
    """Orders from what is easy to type: for each rank a text such as "F0 F1 B0 B1", or a list of actions."""
    if not isinstance(rows, (list, tuple)) or not rows:
        raise ScheduleError(f"Orders are a list with one row for each rank, such as ['F0 F1 B0 B1', 'F0 B0 F1 B1'], not {rows!r}.")
    whole(len(rows), "The number of ranks", 1, MOST["ranks"])
    found = []
    for rank, row in enumerate(rows):
        if not isinstance(row, (str, list, tuple)):
            raise ScheduleError(f"The order of rank {rank} must be text such as 'F0 F1 B0 B1', or a list of actions, not {row!r}.")
        try:
            found.append([one if type(one) is Action else action(one) for one in (row.split() if isinstance(row, str) else row)])
        except ScheduleError as error:
            raise ScheduleError(f"In the order of rank {rank}: {error}") from None
    return found


def size_of(orders) -> tuple[int, int, bool]:
    """(microbatches, chunks a rank, whether backward is split in B and W), from the largest numbers and the kinds in the orders."""
    every = [one for row in orders for one in row]
    if not every:
        raise ScheduleError("The schedule is empty: no rank has an action. Every rank needs F and B of every microbatch.")
    return max(one[1] for one in every) + 1, max(one[2] for one in every) + 1, any(one[0] == "W" for one in every)


def check_orders(rows, microbatches=None, chunks=None, split=None) -> list[list[Action]]:
    """The orders, if every rank has every action once. What is not said is taken from the orders: the largest numbers in them.

    ScheduleError names the rank and the action that is missing, there twice, or beyond the number of microbatches or chunks.
    Whether an order can run is for timed() to say.
    """
    orders = orders_from(rows)
    m, v, halves = size_of(orders)
    m = m if microbatches is None else whole(microbatches, "The number of microbatches", 1, MOST["microbatches"])
    v = v if chunks is None else whole(chunks, "The number of chunks", 1, MOST["chunks"])
    halves = halves if split is None else yes_or_no(split, "split")
    if len(orders) * m * v > MOST_ACTIONS:
        raise ScheduleError(
            f"{len(orders)} ranks x {m:,} microbatches x {v} chunks are too many actions: at most {MOST_ACTIONS:,}."
        )
    needed = dict.fromkeys(Action(kind, i, c) for i in range(m) for c in range(v) for kind in ("FBW" if halves else "FB"))
    for rank, row in enumerate(orders):
        for one, times in Counter(row).items():
            if one not in needed:
                raise ScheduleError(f"Rank {rank} runs {one}, but {_beyond(one, m, v)}.")
            if times > 1:
                raise ScheduleError(f"Rank {rank} runs {one} {times} times; every action is run once.")
        if len(row) < len(needed):
            present = set(row)
            missing = [str(one) for one in needed if one not in present]
            more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
            raise ScheduleError(
                f"Rank {rank} never runs {', '.join(missing[:4])}{more}: every rank runs {' and '.join('FBW' if halves else 'FB')} "
                f"of each of the {m} microbatch{'es'[: 2 * (m > 1)]}{f' in each of its {v} chunks' if v > 1 else ''}."
            )
    return orders


def _beyond(one: Action, m: int, v: int) -> str:
    if one.microbatch >= m:
        return f"there {'is' if m == 1 else 'are'} {m} microbatch{'es'[: 2 * (m > 1)]}: the last is number {m - 1}"
    if one.chunk >= v:
        return f"a rank has {v} chunk{'s'[: v > 1]}: the last is number {v - 1}"
    return "this schedule does not split backward: B computes both gradients, so there is no W"


def needs(one: Action, rank: int, ranks: int, chunks: int) -> list[tuple[int, Action]]:
    """What must have ended before `one` can run on `rank`, as (rank, action).

    F of a stage needs F of the stage before, B needs B of the stage after and its own F, W its own B.
    """
    kind, i, c = one
    if kind == "F":
        if rank > 0:
            return [(rank - 1, one)]
        return [(ranks - 1, Action("F", i, c - 1))] if c > 0 else []
    if kind == "W":
        return [(rank, Action("B", i, c))]
    own = [(rank, Action("F", i, c))]
    if rank < ranks - 1:
        return [*own, (rank + 1, one)]
    return [*own, (0, Action("B", i, c + 1))] if c < chunks - 1 else own


def whole(value, what: str, low: int, high: int) -> int:
    """`value` as an int within low..high. ScheduleError names it and says what is allowed."""
    if isinstance(value, bool) or not hasattr(type(value), "__index__"):
        raise ScheduleError(f"{what} must be a whole number from {low:,} to {high:,}, not {value!r} (a {type(value).__name__}).")
    number = value.__index__()
    if not low <= number <= high:
        shown = f"{number:,}" if abs(number) < 10**15 else "far too large"
        raise ScheduleError(f"{what} is {shown}, but must be a whole number from {low:,} to {high:,}.")
    return number


def number(value, what: str, closed: bool = False):
    """`value` as a plain number, finite and above 0, or 0 too if `closed`. ScheduleError names it and says what is allowed."""
    allowed = f"a finite number{' of 0 or more' if closed else ' above 0'}"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ScheduleError(f"{what} must be {allowed}, not {value!r} (a {type(value).__name__}).")
    # numpy's small types would overflow without a word
    plain = int(value) if isinstance(value, Integral) else value if isinstance(value, Rational) else float(value)
    if not 0 <= plain <= LONGEST or (plain == 0 and not closed):
        if LONGEST < plain < inf:
            raise ScheduleError(f"{what} is far too large: it must be {allowed}, and at most {LONGEST:g}.")
        raise ScheduleError(f"{what} is {value!r}, but must be {allowed}.")
    return plain


def yes_or_no(value, what: str) -> bool:
    """`value`, if it is True or False."""
    if not isinstance(value, bool):
        raise ScheduleError(f"{what} must be True or False, not {value!r} (a {type(value).__name__}).")
    return value


def shown(time) -> str:
    """A time in words: 22, 5/2, 1.25."""
    return f"{time:.6g}" if isinstance(time, float) else str(time)
