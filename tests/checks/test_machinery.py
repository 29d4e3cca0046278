"""Values, structure and the table of exercises."""

import ast
from pathlib import Path

import numpy as np
import pytest

from lessons_lib.checks.exercise import DIFFICULTIES, LESSONS, exercises
from lessons_lib.checks.inside import Draw
from lessons_lib.checks.structure import network_bytes, receives, sends, steps, traffic
from lessons_lib.checks.trial import draw, shown, time_limit
from lessons_lib.checks.values import combination, difference, explain_sum, number, pieces
from lessons_lib.recording import RankLog, Recording

CHECKS = Path(__file__).parents[2] / "lessons_lib" / "checks"


def test_inputs_are_fresh_and_the_same_on_both_sides():
    drawn = [draw(50) for _ in range(20)]
    assert len({one.array().tobytes() for one in drawn}) == 20
    same = Draw(drawn[0].seed, drawn[0].shape)
    assert np.array_equal(same.array(), drawn[0].array()) and same.array() is not same.array()
    values = draw(10_000, dtype="int64").array()
    assert values.dtype == np.int64 and values.min() == -99 and values.max() == 99


# No references: who reads, times and judges a learner's table, and what runs it.
REFEREES = {
    "parallel.schedules": {
        "Action", "Schedule", "ScheduleError", "action", "check_orders", "check_schedule", "needs", "par", "recognise",
        "table_from", "timed",
    },
    "parallel.pipeline": {"Stage", "run_schedule", "split_into_microbatches"},
}  # fmt: skip


def test_references_are_independent_of_the_finished_code():
    for path in CHECKS.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not {alias.name for alias in node.names} <= REFEREES.get(node.module, set()):
                names += [node.module or "", *[alias.name for alias in node.names]]
            assert not any({"parallel", "collectives"} & set(name.split(".")) for name in names), path.name


def test_no_sentence_lost_its_end():
    """A string after a `return "..."` line is a statement of its own, and is never said."""
    for path in CHECKS.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for statement in getattr(node, "body", [])[1:] if isinstance(getattr(node, "body", None), list) else []:
                lost = isinstance(statement, ast.Expr) and isinstance(statement.value, (ast.Constant, ast.JoinedStr))
                assert not lost, f"{path.name}, line {statement.lineno}"


def test_each_lesson_has_exercises_from_a_first_step_to_a_challenge():
    by_lesson = {}
    for exercise in exercises().values():
        by_lesson.setdefault(exercise.notebook, []).append(exercise)
    assert len(by_lesson) == len(LESSONS)
    for found in by_lesson.values():
        assert 4 <= len(found) <= 7
        levels = [DIFFICULTIES.index(exercise.difficulty) for exercise in found]
        assert levels == sorted(levels) and levels[0] == 0 and levels[-1] == len(DIFFICULTIES) - 1
        for exercise in found:
            assert 1 <= exercise.minutes <= 60 and exercise.practises and len(set(exercise.hints)) == 3
            assert exercise.hints[2].count(" ") > 8


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_a_combination_is_found_again(n):
    rng = np.random.default_rng(n)
    sources = [rng.integers(-99, 100, 4 * n).astype("float32") for _ in range(n)]
    factors = rng.integers(-2, 3, n)
    found = combination(sum(f * s for f, s in zip(factors, sources)), sources)
    assert found.tolist() == factors.tolist()
    assert combination(rng.standard_normal(4 * n), sources) is None
    assert combination(sources[0][:1], [s[:1] for s in sources]) is None  # too few numbers to tell


def test_what_is_wrong_with_a_sum():
    sources = [np.random.default_rng(seed).integers(-99, 100, 12).astype("float32") for seed in range(4)]
    total = sum(sources)
    assert explain_sum(1, total, sources) == ""
    assert "own numbers" in explain_sum(1, sources[1], sources)
    assert "rank 3's numbers alone" in explain_sum(1, sources[3], sources)
    assert "divided by 4" in explain_sum(1, total / 4, sources)
    assert explain_sum(1, total - sources[2], sources) == "In this sum the numbers of rank 2 are missing."
    assert explain_sum(1, total + sources[0], sources) == "In this sum it holds rank 0's 2 times."
    assert explain_sum(1, np.zeros(12) + 0.5, sources) == ""


def test_pieces_are_those_of_torch():
    torch = pytest.importorskip("torch")
    for length in (0, 1, 3, 10, 43):
        for n in (1, 2, 3, 5, 8):
            theirs = [part.tolist() for part in torch.arange(length).tensor_split(n)]
            assert [part.tolist() for part in pieces(np.arange(length), n)] == theirs


def test_a_difference_is_shown_from_where_it_begins():
    a, b = np.arange(6.0), np.arange(6.0)
    b[3] = 9
    assert difference(2, a, b) == "Rank 2 should return [3, 4, 5], from element 3 on; it returned [9, 4, 5]."
    assert difference(0, a + 1, b) == "Rank 0 should return [1, 2, 3, 4, ...]; it returned [0, 1, 2, 9, ...]."


@pytest.mark.parametrize(
    ("value", "expected"),
    [(3, 3.0), (2.5, 2.5), (np.float32(0.5), 0.5), (np.int64(4), 4.0), (True, None), (None, None), ("3", None), ([3], None)],
)
def test_a_number_is_recognised(value, expected):
    assert number(value) == expected


def test_a_number_in_a_tensor_is_recognised():
    torch = pytest.importorskip("torch")
    assert number(torch.tensor(1.5)) == 1.5 and number(torch.tensor([2])) == 2.0
    assert number(torch.zeros(2)) is None and number(torch.zeros(1, device="meta")) is None


def log(world, *programs):
    logs = [RankLog(rank, world) for rank in range(world)]
    for rank, program in enumerate(programs):
        program(logs[rank])
    return Recording.from_logs(logs)


def test_steps_count_messages_that_follow_one_another():
    both_at_once = [lambda a: (a.send(1, 10, blocking=False), a.recv(1, 10), a.wait(0)),
                    lambda b: (b.send(0, 10, blocking=False), b.recv(0, 10), b.wait(0))]  # fmt: skip
    assert steps(log(2, *both_at_once)) == 1
    in_turns = [lambda a: (a.send(1, 10), a.recv(1, 99)), lambda b: (b.recv(0, 10), b.send(0, 99))]
    assert steps(log(2, *in_turns)) == 2
    one_port = [lambda a: (a.send(1, 1, blocking=False), a.send(2, 1, blocking=False), a.wait(0), a.wait(1)),
                lambda b: b.recv(0, 1), lambda c: c.recv(0, 1)]  # fmt: skip
    assert steps(log(3, *one_port)) == 2
    assert steps(log(1, lambda a: a.compute(flops=1e9))) == 0


def test_traffic_is_counted_and_told():
    recording = log(4, lambda a: (a.send(1, 10), a.send(3, 20), a.send(3, 5)), lambda b: b.recv(0, 10), lambda c: None,
                    lambda d: (d.recv(0, 20), d.recv(0, 5)))  # fmt: skip
    assert sends(recording, 0) == [(1, 10), (3, 20), (3, 5)] and receives(recording, 3) == [(0, 20), (0, 5)]
    assert network_bytes(recording, 2).tolist() == [25, 0, 0, 0] and network_bytes(recording, 1).tolist() == [35, 0, 0, 0]
    assert traffic(sends(recording, 0)) == "1 message to rank 1 (10 bytes), 2 messages to rank 3 (25 bytes)"
    assert traffic([]) == "no message"


@pytest.mark.parametrize(
    ("text", "load", "seconds"),
    [("3", 90.0, 3.0), ("0.5", 0.0, 0.5), *[(text, 0.1, 10.0) for text in ("", "x", "0", "-1", "nan", "inf")],
     ("", 8.0, 20.0), ("", 4000.0, 60.0)],
)  # fmt: skip
def test_the_time_limit_can_be_set_and_grows_on_a_busy_machine(monkeypatch, text, load, seconds):
    monkeypatch.setenv("LESSONS_CHECK_SECONDS", text)
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0), raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    assert time_limit() == seconds


def test_any_value_can_be_shown():
    class Hostile:
        def __repr__(self):
            raise RuntimeError

    assert shown(Hostile()) == "<Hostile instance> (of type Hostile)"
    assert len(shown("x" * 10**6)) < 200 and len(shown(list(range(10**5)))) < 200 and len(shown({"a": "y" * 10**5})) < 200
