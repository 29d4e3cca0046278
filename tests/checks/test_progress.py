"""The file of progress: kept, shared by kernels, damaged, handed in; and hints."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lessons_lib.checks import NotYet, __main__, check, hint, logbook, progress
from lessons_lib.checks.exercise import exercises

ROOT = Path(__file__).parents[2]


def transfer_time(nbytes, gigabits, microseconds):
    return microseconds * 1e-6 + 8 * nbytes / (gigabits * 1e9)


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.delenv("LESSONS_PROGRESS")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "progress.json"


def test_tries_hints_and_what_is_done_are_kept(file, capsys):
    with pytest.raises(NotYet):
        check(lambda *_: 0.0, "transfer_time")
    hint("transfer_time")
    check(transfer_time)
    check(transfer_time)
    with pytest.raises(NotYet):
        check(lambda *_: 0.0, "transfer_time")  # what is done stays done
    row = json.loads(file.read_text())["exercises"]["01.transfer_time"]
    assert (row["tries"], row["hints"], len(row["done"])) == (2, 1, len("2025-01-31"))
    assert sorted(os.listdir(file.parent)) == ["progress.json"]
    shown = progress()
    assert list(shown.table)[0] == ("01.transfer_time", "warm-up", "yes", 2, 1)
    assert shown.sentence == f"1 of {len([e for e in exercises().values() if e.key.startswith('01.')])} done. Next: exchange."
    assert ">01.transfer_time</td>" in shown._repr_html_() and "02." not in repr(shown)


def test_nothing_yet(file):
    assert "Nothing checked yet" in repr(progress()) and "Nothing checked yet" in progress()._repr_html_()
    assert not file.exists()


def test_hints_come_in_steps_and_then_the_solution(file, capsys):
    given = exercises()["exchange"].hints
    for number in (1, 2, 3):
        hint("exchange")
        assert capsys.readouterr().out.splitlines() == [f"Hint {n} of 3: {given[n - 1]}" for n in range(1, number + 1)]
    hint()  # the one that was asked about last
    assert capsys.readouterr().out.splitlines()[3:] == [
        "There are no more hints. A solution: solutions/01_devices_and_links.ipynb, under exchange."
    ]
    assert logbook.entries()["01.exchange"].hints == 3
    with pytest.raises(NotYet, match="Did you mean 'exchange'"):
        hint("exchang")
    with pytest.raises(NotYet, match="needs your function itself"):
        hint(7)


@pytest.mark.parametrize(
    "damage",
    [b"", b"{", b"\xff\xfe\x00", b"[]", b'{"format": "progress of exercises", "version": 1, "exercises": {"01.exchange": 3}}',
     b'{"format": "progress of exercises", "version": 1, "exercises": {"01.exchange": {"done": 1, "tries": 1, "hints": 0}}}',
     b'{"format": "progress of exercises", "version": 99, "exercises": {}}'],
)  # fmt: skip
def test_a_damaged_file_is_put_aside(file, capsys, damage):
    file.write_bytes(damage)
    check(transfer_time)
    assert (file.parent / "progress.damaged.json").read_bytes() == damage
    assert logbook.entries()["01.transfer_time"].tries == 1
    assert "progress.json could not be read" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_keeps_progress_in_memory(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("LESSONS_PROGRESS", str(tmp_path / "no such folder" / "progress.json"))
    check(transfer_time)
    hint("transfer_time")
    assert logbook.entries()["01.transfer_time"] == logbook.Entry(logbook.entries()["01.transfer_time"].done, 1, 1)
    assert capsys.readouterr().err.count("is kept until this kernel ends") == 1


@pytest.mark.parametrize("place", ["~no-such-user-here/progress.json", ""])
def test_a_place_that_means_nothing_keeps_progress_in_memory(monkeypatch, place):
    monkeypatch.setenv("LESSONS_PROGRESS", place)
    logbook.tried(exercises()["fit"], passed=True)
    assert logbook.path() is None and logbook.entries()["01.fit"].tries == 1


def test_a_deleted_folder_keeps_progress_in_memory(monkeypatch, tmp_path):
    monkeypatch.delenv("LESSONS_PROGRESS")
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    logbook.tried(exercises()["fit"], passed=True)
    assert logbook.entries()["01.fit"].tries == 1


def test_many_at_once_lose_nothing(file):
    code = (
        "import sys; from lessons_lib.checks import logbook; from lessons_lib.checks.exercise import exercises\n"
        "for _ in range(20): logbook.tried(exercises()[sys.argv[1]], passed=False)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    names = ["exchange", "exchange", "fit", "relay"]
    processes = [subprocess.Popen([sys.executable, "-c", code, name], env=environment) for name in names]
    threads = [threading.Thread(target=logbook.tried, args=(exercises()["pass_left"], False)) for _ in range(20)]
    for thread in threads:
        thread.start()
    for waiting in (*threads, *processes):
        waiting.join() if hasattr(waiting, "join") else waiting.wait(60)
    tries = {key: entry.tries for key, entry in logbook.entries().items()}
    assert tries == {"01.exchange": 40, "01.fit": 20, "01.relay": 20, "02.pass_left": 20}
    assert os.listdir(file.parent) == ["progress.json"]


def test_the_lock_of_a_killed_kernel_does_not_block(file, monkeypatch):
    lock = file.with_name("progress.json.lock")
    lock.touch()
    os.utime(lock, (1, 1))
    logbook.tried(exercises()["fit"], passed=True)
    assert logbook.entries()["01.fit"].done and not lock.exists()


def test_handing_in(file, capsys):
    check(transfer_time)
    progress().save("ada.json", name="Ada Lovelace")
    assert "Written to ada.json. 1 of" in capsys.readouterr().out
    Path("broken.json").write_text("{")
    Path("other.json").write_text('{"format": "recording"}')
    __main__.main(["*da.json", "broken.json", "other.json", "missing.json"])
    rows = capsys.readouterr().out.splitlines()
    lessons = [word for number in sorted({e.key[:2] for e in exercises().values()}) for word in ("lesson", number)]
    assert rows[0].split() == ["name", "saved", *lessons, "tries", "hints"] and lessons[:4] == ["lesson", "01", "lesson", "02"]
    assert any(row.startswith("Ada Lovelace") and "1 of 6" in row and "0 of 6" in row for row in rows)
    assert sum("cannot be read" in row for row in rows) == 3


@pytest.mark.parametrize(
    ("arguments", "words"), [((7,), "file is 7"), (("",), "file is ''"), ((None,), "file is None"), (("a.json", 3), "name is 3")]
)
def test_handing_in_refuses_what_makes_no_sense(file, arguments, words):
    with pytest.raises(TypeError, match=words):
        progress().save(*arguments)


def test_a_mistake_of_ours_is_called_ours_and_is_no_try(monkeypatch):
    import dataclasses

    def judge(trial):
        raise KeyError("a bug")

    broken = dataclasses.replace(exercises()["fit"], judge=judge)
    monkeypatch.setitem(exercises(), "fit", broken)
    with pytest.raises(NotYet, match="That is a mistake of the course, not yours"):
        check(lambda sizes, seconds: 0, "fit")
    assert "01.fit" not in logbook.entries()
