"""What a learner calls: check, hint, progress. See the package's docstring."""

from __future__ import annotations

import difflib
from typing import Any

from . import NotYet
from . import logbook as kept
from .exercise import Exercise, Wrong, exercises
from .trial import Trial, shown

_last: list[str] = []  # the exercise that was checked or hinted at last


def check(answer: Any, exercise: str | None = None) -> None:
    __tracebackhide__ = True
    chosen = _find(exercise if exercise is not None else answer, "check")
    line, problem, printed = "", "", ""
    try:
        trial = Trial(chosen, answer)
        try:
            line = chosen.judge(trial)
        finally:
            printed = trial.what_it_printed()
    except Wrong as wrong:
        problem = str(wrong)
    except Exception as bug:  # ours, not the learner's: say so, and go on
        problem = (
            f"The check itself failed ({type(bug).__name__}: {str(bug)[:300]}). That is a mistake of the course, not yours: "
            "please report it, with your code. It does not count as a try."
        )
        raise NotYet(problem) from bug
    kept.tried(chosen, passed=not problem)
    if problem:
        more = f"hint({chosen.name}) gives a hint."
        raise NotYet("\n".join(part for part in (f"Not yet: {chosen.name}.", problem, printed, more) if part))
    print(f"Passed: {chosen.name}. {line}")
    if printed:
        print("(Your code printed, too; that is shown only while a check fails.)")


def hint(exercise: Any = None) -> None:
    __tracebackhide__ = True
    if exercise is None and not _last:
        raise NotYet(f"Which exercise? Give its function or its name: hint({next(iter(exercises()))!r}).")
    chosen = _find(_last[-1] if exercise is None else exercise, "hint")
    number = kept.hinted(chosen)
    for n, text in enumerate(chosen.hints[:number], 1):
        print(f"Hint {n} of 3: {text}")
    if number == 4:
        print(f"There are no more hints. A solution: solutions/{chosen.notebook}, under {chosen.name}.")


def progress() -> kept.Progress:
    return kept.Progress(kept.entries())


def _find(answer: Any, function: str) -> Exercise:
    """The exercise that a learner means, by name or by function."""
    __tracebackhide__ = True
    known = exercises()
    name = answer.rpartition(".")[2] if isinstance(answer, str) else getattr(answer, "__name__", None)
    if isinstance(name, str) and name in known:
        _last[:] = [name]
        return known[name]
    if answer is None or not isinstance(name, str):
        raise NotYet(
            f"{function}() got {shown(answer)}, and needs your function itself, without calling it: {function}(exchange), "
            f"not {function}(exchange(...))."
        )
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.4) or [next(iter(known))]
    call = f"check(your_function, {close[0]!r})" if function == "check" else f"hint({close[0]!r})"
    raise NotYet(f"No exercise is called {name[:60]!r}. Did you mean {close[0]!r}? Then name your function so, or say {call}.")
