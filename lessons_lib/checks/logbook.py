"""A learner's progress: a small file of theirs, safe with two kernels at once, and what is shown of it.

The file is `progress.json` in the notebook's folder, or where LESSONS_PROGRESS says; LESSONS_PROGRESS="" keeps it in memory
alone (as the tests do, so that stored outputs do not depend on what was done before). It holds, for each exercise, whether it is
done and since when, the number of tries until then, and the hints used: nothing else, and nothing leaves the machine.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from html import escape
from pathlib import Path

from ..recording import Table
from .exercise import Exercise, exercises

FILE = "progress.json"
FORMAT, VERSION = "progress of exercises", 1
_PATIENCE, _STALE = 2.0, 10.0  # seconds to wait for another kernel; after which its lock is that of one that was killed


@dataclass(frozen=True)
class Entry:
    """One exercise: `done` is the day on which it first passed, "" before; `tries` counts checks up to then."""

    done: str = ""
    tries: int = 0
    hints: int = 0


_memory: dict[str, Entry] = {}  # where there is no file, or none can be written
_told: set[str] = set()


def path() -> Path | None:
    """Where progress is kept; None: in memory."""
    place = os.environ.get("LESSONS_PROGRESS")
    if place == "":
        return None
    try:
        return Path(place).expanduser() if place else Path.cwd() / FILE
    except (OSError, RuntimeError):  # the folder was deleted; "~" of nobody
        return None


def entries() -> dict[str, Entry]:
    """Progress so far, by Exercise.key."""
    file = path()
    return dict(_memory) if file is None else {**_memory, **_read(file)}


def tried(exercise: Exercise, passed: bool) -> None:
    """Count a check. What is done stays done."""

    def change(entry: Entry) -> Entry:
        if entry.done:
            return entry
        today = datetime.date.today().isoformat()
        return replace(entry, tries=entry.tries + 1, done=today if passed else "")

    _update(exercise.key, change)


def hinted(exercise: Exercise) -> int:
    """Count a hint; returns which one is to be shown: 1 to 3, and 4 once all three have been."""
    shown = min(entries().get(exercise.key, Entry()).hints, 3) + 1
    if shown <= 3:
        _update(exercise.key, lambda entry: replace(entry, hints=max(entry.hints, shown)))
    return shown


def _update(key: str, change: Callable[[Entry], Entry]) -> None:
    file = path()
    if file is None:
        _memory[key] = change(_memory.get(key, Entry()))
        return
    try:
        with _locked(file):
            kept = {**_memory, **_read(file)}
            kept[key] = change(kept.get(key, Entry()))
            _write(file, kept)
    except OSError as error:
        _memory[key] = change(entries().get(key, Entry()))
        _say(f"Progress cannot be written to {file.name} ({error.strerror or error}): it is kept until this kernel ends.")
    else:
        _memory.clear()


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    """One kernel at a time: a lock file, made by whoever comes first. Works on every system, also on network disks."""
    lock, deadline = file.with_name(f"{file.name}.lock"), time.monotonic() + _PATIENCE
    held = False
    while not held and time.monotonic() < deadline:
        try:
            os.close(os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            held = True
        except FileExistsError:
            with contextlib.suppress(OSError):
                if time.time() - lock.stat().st_mtime > _STALE:
                    lock.unlink()
            time.sleep(0.02)
        except PermissionError:
            if not os.access(file.parent, os.W_OK):
                raise
            time.sleep(0.02)  # Windows, while another kernel deletes the lock
    try:
        yield
    finally:
        if held:
            with contextlib.suppress(OSError):
                lock.unlink()


def _write(file: Path, kept: dict[str, Entry]) -> None:
    """All or nothing: a kernel that is killed meanwhile leaves the old file."""
    data = {"format": FORMAT, "version": VERSION, "exercises": {key: asdict(kept[key]) for key in sorted(kept)}}
    descriptor, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as out:
            out.write(json.dumps(data, indent=1) + "\n")
        os.replace(temporary, file)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _read(file: Path) -> dict[str, Entry]:
    """What the file holds. A damaged one is put aside, not lost, and progress starts anew."""
    try:
        return parsed(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as problem:
        aside = file.with_name(f"{file.stem}.damaged{file.suffix}")
        with contextlib.suppress(OSError):
            os.replace(file, aside)
        _say(f"{file.name} could not be read ({problem}). It is now called {aside.name}, and your progress starts anew.")
        return {}
    except OSError as error:
        _say(f"{file.name} cannot be read ({error.strerror or error}).")
        return {}


def parsed(text: str) -> dict[str, Entry]:
    """The entries in the text of a file of progress. ValueError says what is wrong with it."""
    try:
        data = json.loads(text)
    except ValueError:
        raise ValueError("it does not hold JSON") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT or not isinstance(data.get("exercises"), dict):
        raise ValueError("it is not a file of progress")
    if data.get("version") != VERSION:
        raise ValueError(f"it has version {data.get('version')!r}; {VERSION} is read here")
    found = {}
    for key, row in data["exercises"].items():
        if not isinstance(row, dict) or {name: type(value) for name, value in row.items()} != {
            "done": str,
            "tries": int,
            "hints": int,
        }:
            raise ValueError(f"its entry {key!r} is not one")
        found[key] = Entry(**row)
    return found


def _say(text: str) -> None:
    if text not in _told:
        _told.add(text)
        print(text, file=sys.stderr)


# ---- shown to the learner, handed to an instructor ---------------------------------------------------------------------


class Progress:
    """Progress so far: a table of the lessons begun. `save` writes the file to hand in."""

    def __init__(self, kept: dict[str, Entry]):
        self.kept = kept
        begun = {key[:2] for key in kept}
        self.exercises = [e for e in exercises().values() if e.key[:2] in begun]

    @property
    def table(self) -> Table:
        """Every exercise of the lessons begun: done, tries, hints used."""
        rows = []
        for exercise in self.exercises:
            entry = self.kept.get(exercise.key, Entry())
            rows.append((exercise.key, exercise.difficulty, "yes" if entry.done else "not yet", entry.tries, entry.hints))
        return Table(("exercise", "difficulty", "done", "tries", "hints"), rows)

    @property
    def sentence(self) -> str:
        done = [e for e in self.exercises if self.kept.get(e.key, Entry()).done]
        if not self.exercises:
            return "Nothing checked yet: write the first exercise's function and run the cell below it."
        left = [e.name for e in self.exercises if e not in done]
        return f"{len(done)} of {len(self.exercises)} done." + (f" Next: {left[0]}." if left else "")

    def save(self, file, name: str = "") -> None:
        """Write progress for an instructor: plain JSON, with your name if you give it. It tells what you did; it proves nothing."""
        if not isinstance(name, str):
            raise TypeError(f'name is {name!r}; allowed is a text such as "Ada Lovelace"')
        if not isinstance(file, (str, os.PathLike)) or not os.fspath(file):
            raise TypeError(f'file is {file!r}; allowed is the name of a file to write, such as "progress of Ada.json"')
        rows = {key: asdict(entry) for key, entry in sorted(self.kept.items())}
        data = {"format": FORMAT, "version": VERSION, "name": name, "saved": datetime.date.today().isoformat(), "exercises": rows}
        Path(file).write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"Written to {os.path.basename(os.fspath(file))}. {self.sentence}")

    def _repr_html_(self) -> str:
        return (self.table._repr_html_() if self.exercises else "") + f"<p>{escape(self.sentence)}</p>"

    def __repr__(self) -> str:
        return (f"{self.table!r}\n" if self.exercises else "") + self.sentence
