"""Every wrong answer in tests/wrong_answers is rejected, each for its own reason."""

from collections import Counter
from functools import cache

import collecting
import lesson_01  # noqa: F401 - importing collects
import lesson_02  # noqa: F401
import lesson_03  # noqa: F401
import lesson_04  # noqa: F401
import lesson_05  # noqa: F401
import pytest

from lessons_lib.checks import NotYet, check
from lessons_lib.checks.exercise import exercises

ANSWERS = [pytest.param(wrong, id=f"{wrong.exercise}-{wrong.answer.__name__}") for wrong in collecting.ALL]


@cache
def message(wrong) -> str:
    """What the check says about it; "passed" if it passes."""
    try:
        check(wrong.answer, wrong.exercise)
    except NotYet as problem:
        return str(problem)
    return "passed"


@pytest.mark.parametrize("wrong", ANSWERS)
def test_it_is_rejected_for_its_reason(wrong):
    said = message(wrong)
    assert wrong.says in said
    assert said.startswith(f"Not yet: {wrong.exercise}.\n") and said.endswith(f"\nhint({wrong.exercise}) gives a hint.")
    assert len(said) < 3000 and "check itself failed" not in said


@pytest.mark.parametrize("name", exercises())
def test_no_reason_is_given_for_two_answers(name):
    answers = [wrong for wrong in collecting.ALL if wrong.exercise == name]
    assert len(answers) >= 4
    for wrong in answers:
        others = [other.answer.__name__ for other in answers if other is not wrong and wrong.says in message(other)]
        assert not others, f"{wrong.says!r} is said about {wrong.answer.__name__} and about {others}"


def test_every_wrong_answer_is_to_an_exercise_and_has_its_own_name():
    assert {wrong.exercise for wrong in collecting.ALL} == set(exercises())
    names = Counter((wrong.exercise, wrong.answer.__name__) for wrong in collecting.ALL)
    assert max(names.values()) == 1


@pytest.mark.parametrize("name", exercises())
def test_messages_do_not_tell_the_answer(name):
    """The last hint comes nearest to the answer: no message holds its code."""
    code = {"pass_left": "(rank - 1) % n", "left_all_gather": "(r + s", "left_reduce_scatter": "(r + 1 + s", "fit": "lstsq",
            "average_by_count": "samples / total", "average_over_microbatches": "/ samples", "norm_of_copies": ".sum() / k",
            "heads_of_rank": "* kv_heads //", "split_cross_entropy": "amax", "gated_mlp": "view_as"}  # fmt: skip
    for wrong in collecting.ALL:
        if wrong.exercise == name:
            # the lines of the learner's own program, which errors quote, are theirs
            told = "\n".join(
                line for line in message(wrong).splitlines() if ".py, line" not in line and not line.startswith("    ")
            )
            assert code.get(name, "### BEGIN SOLUTION") not in told
