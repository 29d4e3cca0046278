"""Exercises: check(answer) runs a learner's function on real ranks and says what is right or wrong about it.

    from lessons_lib.checks import check, hint, progress

One module per lesson says what its exercises must show. Names are imported when called, so that a rank that imports
`lessons_lib.checks.inside` loads nothing else.
"""

from __future__ import annotations

__all__ = ["NotYet", "check", "hint", "progress"]


class NotYet(AssertionError):
    """An answer does not pass yet. A notebook shows the sentence alone, without a traceback: the fault is not in the check."""

    def _render_traceback_(self) -> list[str]:
        return [part for line in str(self).splitlines() for part in _wrapped(line)]


def _wrapped(line: str) -> list[str]:
    """A line in parts of at most 100 columns: the Lab itself breaks long lines in the middle of a word."""
    from textwrap import wrap

    indent = line[: len(line) - len(line.lstrip())]
    return wrap(line, 100, subsequent_indent=2 * indent, break_long_words=False, break_on_hyphens=False) or [line]


def check(answer, exercise: str | None = None) -> None:
    """Run `answer`, your function, on fresh random inputs and several numbers of ranks. Raises NotYet with a sentence if not right.

    The exercise is recognised by the function's name; `exercise` names it otherwise: check(mine, "exchange").
    """
    from . import desk

    desk.check(answer, exercise)


def hint(exercise=None) -> None:
    """Print the next of an exercise's three hints; without an argument, of the exercise that was checked last."""
    from . import desk

    desk.hint(exercise)


def progress():
    """What you have done so far: displays itself; `progress().save("my name.json", name="my name")` writes it for an instructor."""
    from . import desk

    return desk.progress()
