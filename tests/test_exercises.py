"""The notebooks of exercises and solutions: made one from the other, as nbgrader makes them, and kind to those who begin."""

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
import make_exercises  # noqa: E402
import store_outputs  # noqa: E402
import test_notebooks  # noqa: E402

SOLUTIONS = sorted((ROOT / "solutions").glob("*.ipynb"))
SOLUTION = {"grade": False, "solution": True, "locked": False, "task": False, "schema_version": 3}
CHECK = {"grade": True, "solution": False, "locked": True, "task": False, "schema_version": 3}
POINTS = {"warm-up": 1, "easy": 2, "medium": 3, "hard": 4, "challenge": 5}


def read(path):
    return nbformat.reads(path.read_text(encoding="utf-8"), as_version=4)


@pytest.fixture(params=SOLUTIONS, ids=lambda path: path.name)
def solution(request):
    return request.param


def exercises_of(path):
    pytest.importorskip("torch")
    from lessons_lib.checks.exercise import exercises

    return [exercise for exercise in exercises().values() if exercise.notebook == path.name]


# ---- made from the solutions -----------------------------------------------------------------------------------------


def test_exercises_are_made_from_the_solutions_byte_for_byte():
    wanted = make_exercises.made(ROOT / "solutions")
    there = {path.name: path.read_bytes().decode("utf-8") for path in (ROOT / "exercises").glob("*.ipynb")}
    assert there == wanted, "run `make exercises`"
    ran = subprocess.run([sys.executable, "tests/make_exercises.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_nbgrader_makes_the_same_blanks(solution, tmp_path, monkeypatch):
    """The instructor's path: nbgrader's own generate_assignment, with its default settings, on the solutions."""
    if "CI" not in os.environ:
        pytest.importorskip("nbgrader")
    from nbgrader.apps import NbGraderAPI
    from traitlets.config import Config

    # nbgrader calls the program alembic by its name, as in an environment that is activated
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable) + os.pathsep + os.environ.get("PATH", ""))
    (tmp_path / "source" / "lesson").mkdir(parents=True)
    (tmp_path / "source" / "lesson" / solution.name).write_bytes(solution.read_bytes())
    config = Config()
    config.CourseDirectory.root = str(tmp_path)
    config.CourseDirectory.db_url = f"sqlite:///{tmp_path / 'gradebook.db'}"
    result = NbGraderAPI(config=config).generate_assignment("lesson", create=True)
    assert result["success"], result["error"]
    theirs = read(tmp_path / "release" / "lesson" / solution.name)
    ours = read(ROOT / "exercises" / solution.name)
    assert [(cell.cell_type, cell.source) for cell in theirs.cells] == [(cell.cell_type, cell.source) for cell in ours.cells]
    for their_cell, our_cell in zip(theirs.cells, ours.cells):
        marks = dict(their_cell.metadata.get("nbgrader", {}))
        for added in ("checksum", "cell_type"):  # nbgrader's own bookkeeping
            marks.pop(added, None)
        assert marks == our_cell.metadata.get("nbgrader", {})
        assert not their_cell.get("outputs") and not our_cell.get("outputs")


def test_each_exercise_has_its_text_its_cell_and_its_check(solution):
    notebook, found = read(solution), exercises_of(solution)
    assert found
    graded = [cell for cell in notebook.cells if "nbgrader" in cell.metadata]
    assert len(graded) == 2 * len(found)
    for number, (exercise, cell, check) in enumerate(zip(found, graded[::2], graded[1::2]), 1):
        assert dict(cell.metadata.nbgrader) == {**SOLUTION, "grade_id": exercise.name}
        points = POINTS[exercise.difficulty]
        assert dict(check.metadata.nbgrader) == {**CHECK, "points": points, "grade_id": f"check_{exercise.name}"}
        assert f'def {exercise.call}:\n    """' in cell.source and check.source == f"check({exercise.name})"
        at = notebook.cells.index(cell)
        text, minutes = notebook.cells[at - 1].source, f"{exercise.minutes} minutes"
        assert notebook.cells[at + 1] is check
        assert text.startswith(
            f"## {number} · {exercise.name}\n\n*{exercise.difficulty} · {minutes} · practises {exercise.practises}*\n"
        )
    assert notebook.cells[-1].source == "progress()"
    made = read(ROOT / "exercises" / solution.name)
    blanks = [cell.source for cell in made.cells if cell.cell_type == "code" and "raise NotImplementedError()" in cell.source]
    assert len(blanks) == len(found)
    assert not any(mark in cell.source for cell in made.cells for mark in (make_exercises.BEGIN, make_exercises.END))


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("### BEGIN SOLUTION\nx = 1", "is missing"),
        ("### BEGIN SOLUTION\n### BEGIN SOLUTION\n### END SOLUTION", "stands twice"),
        ("x = 1\n### END SOLUTION", "stands without"),
    ],
)
def test_marks_must_pair(source, problem):
    with pytest.raises(ValueError, match=problem):
        make_exercises.blank(source)


def test_marks_and_metadata_go_together():
    cell = nbformat.v4.new_code_cell("### BEGIN SOLUTION\nx = 1\n### END SOLUTION")
    with pytest.raises(ValueError, match="go together"):
        make_exercises.exercise_of(nbformat.v4.new_notebook(cells=[cell]))
    cell.metadata["nbgrader"] = {**SOLUTION, "grade_id": "x"}
    made = make_exercises.exercise_of(nbformat.v4.new_notebook(cells=[cell]))
    assert made.cells[0].source == "# YOUR CODE HERE\nraise NotImplementedError()"
    assert "BEGIN" in cell.source  # the solution is as it was


def test_a_blank_is_as_deep_as_its_mark():
    source = "def f():\n    a = 1\n    ### BEGIN SOLUTION\n    b = 2\n    ### END SOLUTION\n    return a"
    wanted = "def f():\n    a = 1\n    # YOUR CODE HERE\n    raise NotImplementedError()\n    return a"
    assert make_exercises.blank(source) == wanted


# ---- kind to those who begin -----------------------------------------------------------------------------------------


def test_a_blank_notebook_stops_at_its_first_exercise_with_a_sentence(solution, tmp_path):
    """As a learner's Lab runs it, all cells: a sentence in place of a traceback."""
    from nbclient.exceptions import CellExecutionError

    first = exercises_of(solution)[0]
    notebook = read(ROOT / "exercises" / solution.name)
    with pytest.raises(CellExecutionError):
        store_outputs.execute(notebook, tmp_path)
    failed = [cell for cell in notebook.cells if any(out.output_type == "error" for out in cell.get("outputs", []))]
    assert [cell.source for cell in failed] == [f"check({first.name})"]
    error = next(out for out in failed[0].outputs if out.output_type == "error")
    lines = [
        f"Not yet: {first.name}.",
        f"{first.name} is still blank. Write your code in place of `raise NotImplementedError`, run that cell, then this one "
        "again.",
        f"hint({first.name}) gives a hint.",
    ]
    assert error.traceback[0] == lines[0] and max(map(len, error.traceback)) <= 100
    assert " ".join(error.traceback) == " ".join(lines)


def test_every_blank_is_called_blank(solution, monkeypatch):
    found = exercises_of(solution)
    from lessons_lib.checks import NotYet, check

    monkeypatch.setenv("LESSONS_PROGRESS", "")
    notebook = read(ROOT / "exercises" / solution.name)
    space = {}
    exec(next(cell.source for cell in notebook.cells if cell.cell_type == "code"), space)
    for cell in notebook.cells:
        if cell.metadata.get("nbgrader", {}).get("solution"):
            exec(cell.source, space)
    for exercise in found:
        with pytest.raises(NotYet) as caught:
            check(space[exercise.name])
        assert f"\n{exercise.name} is still blank. " in str(caught.value)


RULES = [
    test_notebooks.test_stored_as_run_once_from_top_to_bottom,
    test_notebooks.test_errors_are_stored_only_where_they_are_meant,
    test_notebooks.test_every_exempt_cell_says_why,
    test_notebooks.test_outputs_name_nothing_of_the_machine_that_stored_them,
    test_notebooks.test_code_cells_are_short,
    test_notebooks.test_prose_is_short,
    test_notebooks.test_a_single_title_first,
    test_notebooks.test_kernel_and_metadata_are_those_of_any_machine,
    test_notebooks.test_pictures_in_prose_exist_and_have_a_text,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_solutions_keep_the_rules_of_lessons(solution, rule):
    assert list(inspect.signature(rule).parameters) == ["notebook"]
    rule(read(solution))


def test_solutions_exempt_nothing_from_comparison(solution):
    assert not [cell for cell in read(solution).cells if test_notebooks.tags(cell) & test_notebooks.EXEMPT]


def test_numbers_in_the_texts_are_those_of_the_checks():
    pytest.importorskip("torch")
    from lessons_lib.checks import judge_messages, judge_trees
    from lessons_lib.formulas import ring_all_reduce
    from lessons_lib.hardware import ETHERNET_100G, PCIE4

    first, second = ("\n".join(cell.source for cell in read(path).cells) for path in SOLUTIONS[:2])
    relay = 4 * judge_messages._RELAY_LENGTH
    whole = (judge_messages._RELAY_RANKS - 1) * (PCIE4.latency + relay / PCIE4.bandwidth)
    assert f"Rank 0 has {relay / 1e6:.0f} MB" in first and f"five H100s over PCIe 4 need {1e6 * whole:.0f} us" in first
    assert f"**Par is {1e6 * judge_messages.PAR_RELAY:.0f} us** (replayed)" in first
    assert f"**Par is {judge_messages.PAR_PRODUCTS}** (replayed)" in first
    nbytes = 4 * judge_trees._LENGTH
    flat = ring_all_reduce(nbytes, 8, ETHERNET_100G.bandwidth, ETHERNET_100G.latency)
    assert f"Sum {nbytes / 1e6:.0f} MB over 2 x 4" in second and round(flat / judge_trees.PAR_TIME) == 5
    assert f"**Par is {1e6 * judge_trees.PAR_TIME:.0f} us** (replayed)" in re.sub(r"\s+", " ", second)
    assert "takes five times as long" in re.sub(r"\s+", " ", second)


def test_numbers_in_the_texts_of_lesson_03_are_those_of_the_checks(monkeypatch):
    """What takes longer than par is said in the text, and by the check about an answer that does just that."""
    pytest.importorskip("torch")
    sys.path.insert(0, str(ROOT / "tests" / "wrong_answers"))
    import lesson_03

    from lessons_lib.checks import NotYet, check, judge_overlap

    monkeypatch.setenv("LESSONS_PROGRESS", "")
    text = re.sub(r"\s+", " ", "\n".join(cell.source for cell in read(ROOT / "solutions" / "03_data_parallel.ipynb").cells))
    assert f"**Par is {1e6 * judge_overlap.PAR_STEP:.0f} us** (replayed)" in text
    model = f"{judge_overlap.DEPTH} layers of {judge_overlap.WIDTH:,} in bfloat16"
    assert model in text and f"a rank has {judge_overlap.SAMPLES:,} samples" in text
    times = []
    for answer in (lesson_03.one_for_each_parameter, lesson_03.one_for_all_as_views, lesson_03.one_for_all):
        with pytest.raises(NotYet) as said:
            check(answer, "overlapped_backward")
        found = re.search(r"NVLink 4: ([\d,]+) us", str(said.value))[1]
        times.append(f"{int(found.replace(',', '')) / 1000:.1f}")
    each, *one = times
    assert f"an all-reduce for each parameter takes about {each} ms even from hooks" in text
    assert f"with a single buffer {one[0]} to {one[1]} ms (replayed)" in text


def test_numbers_in_the_texts_of_lesson_04_are_those_of_the_checks():
    pytest.importorskip("torch")
    from lessons_lib.checks import judge_sequence as judge

    text = re.sub(r"\s+", " ", "\n".join(cell.source for cell in read(ROOT / "solutions" / "04_tensor_parallel.ipynb").cells))
    assert f"**Par is {judge.PAR_KEPT:,} bytes** kept for backward" in text
    assert f"for {judge.TOKENS} tokens of {judge.WIDTH} on {judge.RANKS} ranks" in text
    assert f"{'zero one two three four five six'.split()[judge._CALLS]} gathers and scatters of x" in text
