"""Wrong answers, each with the words that its check must say about it and about no other of the same exercise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class WrongAnswer:
    """`says` stands in the message for this answer, and in none for another wrong answer to the same exercise."""

    exercise: str
    answer: Callable
    says: str


ALL: list[WrongAnswer] = []


def wrong(exercise: str, says: str) -> Callable:
    def collect(answer: Callable) -> Callable:
        ALL.append(WrongAnswer(exercise, answer, says))
        return answer

    return collect
