"""An exercise: what it is called, what it practises, who judges an answer, and its three hints."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

LESSONS = (  # the modules of this package, in the order of the course
    "lesson_01",
    "lesson_02",
    "lesson_03",
    "lesson_04",
    "lesson_05",
)
DIFFICULTIES = ("warm-up", "easy", "medium", "hard", "challenge")


class Wrong(Exception):
    """Raised by a judge: the sentence that the learner reads."""


@dataclass(frozen=True)
class Exercise:
    """`judge(trial)` runs the answer, raises Wrong, and returns the line that is printed on passing.

    `name` is the function that the learner writes, `parameters` its parameters, `notebook` the lesson's file name.
    """

    name: str
    parameters: tuple[str, ...]
    notebook: str
    difficulty: str
    minutes: int
    practises: str
    judge: Callable[..., str]
    hints: tuple[str, str, str]

    @property
    def key(self) -> str:
        """How the exercise is called in the file of progress: "02.tree_broadcast"."""
        return f"{self.notebook[:2]}.{self.name}"

    @property
    def call(self) -> str:
        return f"{self.name}({', '.join(self.parameters)})"


@lru_cache(maxsize=1)
def exercises() -> dict[str, Exercise]:
    """All exercises of the course by name."""
    found: dict[str, Exercise] = {}
    for lesson in LESSONS:
        for exercise in importlib.import_module(f"{__package__}.{lesson}").EXERCISES:
            if exercise.name in found:
                raise ValueError(f"Two exercises are called {exercise.name}: check() tells them apart by name.")
            found[exercise.name] = exercise
    return found
