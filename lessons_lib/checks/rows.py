"""What an answer returned as a schedule, read: every wrong type, word and size gets a sentence. Lesson 05."""

from __future__ import annotations

from typing import Any

from ..parallel.schedules import Action, Schedule, ScheduleError, action, table_from
from .exercise import Wrong
from .trial import shown

MOST_WORDS = 2_000  # in one row
_LONGEST, _LONGEST_WORD = 600, 20  # characters of a reason, and of an action


def read_table(value: Any, ranks: int) -> Schedule:
    """`value`, for each rank a text or a list with a word a slot, as a table that may still be impossible; else Wrong."""
    rows = [line for line in value.splitlines() if line.strip()] if isinstance(value, str) else value
    kind = f"a list of {ranks} texts, one for each rank"
    if not isinstance(rows, (list, tuple)) or not rows:
        raise Wrong(f"Your function returned {shown(value)}, and should return {kind}.{_missing(value)}")
    for rank, row in enumerate(rows):
        if not isinstance(row, (str, list, tuple)):
            raise Wrong(f"Your function should return {kind}; the row of rank {rank} is {shown(row)}.")
        _expect_short(row.split() if isinstance(row, str) else row, f"The row of rank {rank}")
    if len(rows) != ranks:
        raise Wrong(f"Your table has {len(rows):,} row{'s'[: len(rows) != 1]}, and there are {ranks} ranks: one row for each.")
    try:
        return table_from([row if isinstance(row, str) else _line(row, rank) for rank, row in enumerate(rows)])
    except ScheduleError as error:
        raise Wrong(reason(error)) from None


def _line(words, rank: int) -> str:
    """A row given as a list of words, as a text; a word that is empty is a slot without work."""
    for word in words:
        if not isinstance(word, str) or len(word) > _LONGEST_WORD:
            raise Wrong(f"In the row of rank {rank} there is {shown(word)}: a slot is a text such as 'F3', or '.' to wait.")
    return " ".join("".join(word.split()) or "." for word in words)


def read_orders(value: Any, ranks: int, call: str) -> list[list[Action]]:
    """`value`, an order for each rank, as actions; else Wrong."""
    if not isinstance(value, (list, tuple)) or not value:
        raise Wrong(f"{call} returned {shown(value)}, and should return a list with an order for each rank.{_missing(value)}")
    if len(value) != ranks:
        raise Wrong(f"{call} returned {len(value):,} order{'s'[: len(value) != 1]}, and there are {ranks} ranks: one for each.")
    return [read_order(row, call, f" for rank {rank}") for rank, row in enumerate(value)]


def read_order(value: Any, call: str, whose: str = "") -> list[Action]:
    """`value`, such as "F0 F1 B0 B1" or ["F0", "F1", "B0", "B1"], as actions; dots, slots without work, go. Else Wrong."""
    words = value.split() if isinstance(value, str) else value
    if not isinstance(words, (list, tuple)):
        raise Wrong(f'{call} returned {shown(value)}{whose}, and should return an order such as "F0 F1 B0 B1".{_missing(value)}')
    _expect_short(words, f"What {call} returned{whose}")
    return [_read(word, f"In what {call} returned{whose}") for word in words if not _idle(word)]


def _idle(word: Any) -> bool:
    """Whether a word is one of those that mean in a table: no action begins here."""
    return isinstance(word, str) and 0 < len(word) <= _LONGEST_WORD and not word.strip(" .~-")


def _read(word: Any, where: str) -> Action:
    if isinstance(word, tuple) or (isinstance(word, str) and len(word) <= _LONGEST_WORD):
        try:
            return action(word)
        except ScheduleError as error:
            raise Wrong(f"{where}: {reason(error)}") from None
        except Exception:
            pass  # a tuple that holds something odd
    raise Wrong(f"{where} there is {shown(word)}: an action is a text such as 'F3'.")


def reason(error: ScheduleError) -> str:
    """The sentence of a ScheduleError, with its first letter large, and bounded."""
    text = str(error)
    text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
    return text[:1].upper() + text[1:]


def _expect_short(words, what: str) -> None:
    if len(words) > MOST_WORDS:
        raise Wrong(
            f"{what} has {len(words):,} words; {MOST_WORDS:,} are more than any schedule here needs. Does a loop run too long?"
        )


def _missing(value: Any) -> str:
    return " Is the `return` missing?" if value is None else ""
