"""The prediction widget: it takes what people type, keeps it, shows it beside the result; and what widgets store is stable."""

import json
import re
import subprocess
import sys

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient

from lessons_lib.explorers import explore, guess
from lessons_lib.explorers.guesses import _KEPT, parse
from lessons_lib.hardware import H100, Cluster
from lessons_lib.recording import RankLog, Recording
from lessons_lib.replay import replay


def reduced():
    logs = [RankLog(r, 4) for r in range(4)]
    for log in logs:
        log.compute(flops=1e12 * (1 + log.rank))
        log.collective("all_reduce", 50_000_000)
    return Recording.from_logs(logs)


def displayed(widget, monkeypatch):
    """The outputs that a cell with this widget stores, as (data, ...)."""
    import IPython.display

    outputs = []
    monkeypatch.setattr(IPython.display, "display", lambda data, raw: outputs.append(data))
    widget._ipython_display_()
    return outputs


@pytest.fixture(autouse=True)
def forget():
    _KEPT.clear()


CHOICES = {"faster": "You may think that more devices always help.", "slower": "Latency grows with the ring.", "the same": ""}


def test_a_choice_is_kept_and_shown_beside_the_result():
    made = guess("Is 8 faster than 4?", choices=CHOICES)
    assert made.prediction is None and made.entry.value is None
    made.entry.value = "faster"
    assert made.prediction == "faster" and "Kept: faster." in made.note.value
    assert repr(made.reveal("slower")).splitlines() == [
        "Is 8 faster than 4?", "You predicted: faster.", "Result: slower.",
        "Not so: You may think that more devices always help.", "Latency grows with the ring.",
    ]  # fmt: skip
    made.entry.value = "slower"
    assert repr(made.reveal("slower", kind="measured")).splitlines()[1:] == [
        "You predicted: slower.", "Result (measured): slower.", "That is right.", "Latency grows with the ring.",
    ]  # fmt: skip
    made.entry.value = "the same"
    assert "Not so: compare the two." in repr(made.reveal("slower"))


def test_running_on_without_an_answer_is_always_possible():
    assert repr(guess("How many?", unit="messages").reveal(6)).splitlines() == [
        "How many?", "You made no prediction.", "Result: 6.00 messages.",
    ]  # fmt: skip
    assert "You made no prediction." in repr(guess("Which?", choices=["a", "b"], answer="b").reveal())


def test_a_prediction_survives_running_the_cell_again_and_belongs_to_its_question():
    guess("How long?", unit="ms").entry.value = "12"
    again = guess("How long?", unit="ms")
    assert again.prediction == 12.0 and again.entry.value == "12" and "Kept: 12.0 ms." in again.note.value
    assert guess("How long now?", unit="ms").prediction is None
    assert guess("Asked in other words", unit="ms", key="How long?").prediction == 12.0
    assert guess("How long?", choices=["a", "b"]).prediction is None  # a number is no choice
    guess("Which?", choices=["a", "b"]).entry.value = "b"
    assert guess("Which?", choices=["a", "b"]).entry.value == "b" and guess("Which?", choices=["c", "d"]).entry.value is None


@pytest.mark.parametrize(
    "typed, unit, value",
    [
        ("12", "ms", 12.0),
        (" 12.5 ", "ms", 12.5),
        ("12.5ms", "ms", 12.5),
        ("2 s", "ms", 2000.0),
        ("300 us", "ms", 0.3),
        ("300 µs", "ms", 0.3),
        ("1,200", "ms", 1200.0),
        ("1,200,000.5", "ms", 1200000.5),
        ("1e3", "messages", 1000.0),
        ("0", "ms", 0.0),
        (".5", "s", 0.5),
        ("40 %", "%", 40.0),
        ("450 GB/s", "GB/s", 450.0),
        ("50 MB/s", "GB/s", 0.05),
        ("8 MB", "GB", 0.008),
        ("6 messages", "messages", 6.0),
        ("2 MS", "ms", 2.0),
    ],
)
def test_numbers_as_people_type_them(typed, unit, value):
    assert parse(typed, unit) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    "typed, words",
    [
        ("abc", "“abc” is not a number of 0 or more: type one such as 12.5 (ms)"),
        ("nan", "“nan” is not a number"),
        ("inf", "is not a number"),
        ("-3", "“-3” is not a number of 0 or more"),
        ("12,5", "“12,5” is not a number"),
        ("1 2", "is not a number"),
        ("1e999", "is not a number"),
        ("12 parsecs", "“12 parsecs” has a unit that is not known here: type a number of ms (or in s, ms, us, ns)"),
        ("ms", "is not a number"),
        ("1e308 s", "too large"),
        ("--1", "is not a number"),
        ("12 <b>", "unit that is not known"),
    ],
)
def test_what_is_no_number_is_answered_with_a_sentence_and_not_kept(typed, words):
    made = guess("How long?", unit="ms")
    made.entry.value = "7"
    made.entry.value = typed
    assert made.prediction is None and re.escape(words) in re.escape(made.note.value.replace("&lt;", "<").replace("&gt;", ">"))
    made.entry.value = ""
    assert made.prediction is None and "No prediction yet" in made.note.value


@pytest.mark.parametrize(
    "predicted, result, words",
    [
        ("10", 10, "That is exactly right."),
        ("10", 10.9, "That is right to within 10%."),
        ("10", 20, "Your prediction is 2.00 times too low."),
        ("30", 20, "Your prediction is 1.50 times too high."),
        ("0", 20, "One of the two is zero."),
    ],
)
def test_numbers_are_compared(predicted, result, words):
    made = guess("How long?", unit="ms", answer=result)
    made.entry.value = predicted
    assert repr(made.reveal()).splitlines()[-1] == repr(made.reveal(result)).splitlines()[-1] == words


def test_a_timeline_is_a_result_and_says_its_kind():
    made, timeline = guess("How long?", unit="ms"), replay(reduced(), Cluster(H100))
    assert f"Result (replayed): {timeline.step_time * 1e3:.3g} ms." in repr(made.reveal(timeline)).replace("0 ms", "0 ms")
    with pytest.raises(ValueError, match="is a timeline, but the prediction is in GB"):
        guess("How much?", unit="GB").reveal(timeline)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"question": ""}, "question is ''"),
        ({"question": None}, "question is None"),
        ({"question": "Q"}, 'choices=["less", "more"] or unit="ms"'),
        ({"question": "Q", "choices": ["a", "b"], "unit": "ms"}, "either"),
        ({"question": "Q", "choices": []}, "two or more"),
        ({"question": "Q", "choices": ["a"]}, "two or more"),
        ({"question": "Q", "choices": ["a", "a"]}, "different"),
        ({"question": "Q", "choices": "ab"}, "choices is 'ab'"),
        ({"question": "Q", "choices": [1, 2]}, "texts"),
        ({"question": "Q", "choices": 5}, "choices is 5"),
        ({"question": "Q", "unit": ""}, "unit is ''"),
        ({"question": "Q", "unit": 3}, "unit is 3"),
        ({"question": "Q", "unit": "ms", "key": 3}, "key is 3"),
        ({"question": "Q", "unit": "ms", "answer": "ten"}, "answer is 'ten'"),
        ({"question": "Q", "unit": "ms", "answer": float("nan")}, "answer is nan"),
        ({"question": "Q", "unit": "ms", "answer": True}, "answer is True"),
        ({"question": "Q", "choices": ["a", "b"], "answer": "c"}, "one of the choices: 'a', 'b'"),
    ],
)
def test_questions_that_cannot_be_asked(options, words):
    with pytest.raises((TypeError, ValueError), match=re.escape(words)):
        guess(**options)


def test_results_that_cannot_be_compared():
    with pytest.raises(ValueError, match="nothing to reveal: call reveal"):
        guess("How long?", unit="ms").reveal()
    with pytest.raises(ValueError, match="result is -1; allowed is a finite number of ms, 0 or more"):
        guess("How long?", unit="ms").reveal(-1)
    with pytest.raises(TypeError, match="result is '3'; allowed is a number of ms"):
        guess("How long?", unit="ms").reveal("3")
    with pytest.raises(ValueError, match="result is 1000.*allowed is a finite number of ms"):
        guess("How long?", unit="ms").reveal(10**400)
    with pytest.raises(ValueError, match=r"result is \['less'\]; allowed is one of the choices: 'less', 'more'"):
        guess("How much?", choices=["less", "more"]).reveal(["less"])
    assert "Result: 3.00 ms" in repr(guess("How long?", unit="ms").reveal(np.float64(3)))


def test_what_a_guess_stores_names_question_and_choices_and_never_the_answer_given(monkeypatch):
    made = guess("Is 1 < 2?", choices=CHOICES)
    before = displayed(made, monkeypatch)[0]
    made.entry.value = "faster"
    static, live = displayed(made, monkeypatch)
    assert static == before == displayed(guess("Is 1 < 2?", choices=CHOICES), monkeypatch)[0]
    assert static["text/plain"] == "Predict: Is 1 < 2?\n  ( ) faster\n  ( ) slower\n  ( ) the same"
    assert "Is 1 &lt; 2?" in static["text/html"] and live["text/plain"] == repr(made) and "faster" not in repr(made)


def test_reveals_show_themselves_with_texts_escaped():
    made = guess("Is 1 < 2?", choices={"<yes>": "", "no": ""})
    made.entry.value = "<yes>"
    html = made.reveal("<yes>")._repr_html_()
    assert "&lt;yes&gt;" in html and "<yes>" not in html and "That is right." in html


NOTEBOOK = """
from lessons_lib import explore, guess
from lessons_lib.hardware import H100, Cluster
from lessons_lib.recording import RankLog, Recording
log = RankLog(0, 1)
log.compute(flops=1e12)
explore(Recording.from_logs([log]), Cluster(H100))
"""


def test_stored_notebooks_pass_nbval_strictly(tmp_path):
    """Run a notebook, store its outputs, run it again under nbval: equal but for model ids."""
    guesses = 'g = guess("How long?", unit="ms")\ng', 'h = guess("Which?", choices=["a", "b"])\nh', 'h.reveal("a")', "g.reveal(3)"
    cells = [nbformat.v4.new_code_cell(text) for text in (NOTEBOOK, *guesses)]
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    notebook = nbformat.v4.new_notebook(cells=cells, metadata=metadata)
    NotebookClient(notebook, timeout=120).execute()
    assert [len(cell["outputs"]) for cell in notebook.cells] == [2, 2, 2, 1, 1]
    nbformat.write(notebook, tmp_path / "widgets.ipynb")
    command = [sys.executable, "-m", "pytest", "--nbval", "--nbval-cell-timeout=120", "-q", "-p", "no:cacheprovider", "--rootdir"]
    ran = subprocess.run([*command, str(tmp_path), str(tmp_path / "widgets.ipynb")], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0 and "5 passed" in ran.stdout, ran.stdout + ran.stderr


def test_state_of_the_widgets_is_plain_json():
    """What is saved with a notebook, if the reader saves widget state."""
    for widget in (explore(reduced(), Cluster(H100)).picture, guess("How long?", unit="ms").note):
        json.dumps(widget.get_state(), default=str)
