"""For instructors: a table of the progress that learners handed in.

python -m lessons_lib.checks handed_in/*.json
"""

from __future__ import annotations

import glob
import json
import sys
from pathlib import Path

from ..recording import Table
from .exercise import exercises
from .logbook import Entry, parsed


def summary(files: list[str]) -> Table:
    """One row a file: name, when it was saved, exercises done by lesson, tries and hints in all. Unreadable files say why."""
    lessons = sorted({e.key[:2] for e in exercises().values()})
    rows = []
    for file in files:
        try:
            text = Path(file).read_text(encoding="utf-8")
            kept = parsed(text)
            data = json.loads(text)
        except (OSError, ValueError) as problem:
            rows.append((Path(file).name, f"cannot be read: {problem}", *[""] * (len(lessons) + 2)))
            continue
        done = []
        for lesson in lessons:
            keys = [e.key for e in exercises().values() if e.key[:2] == lesson]
            done.append(f"{sum(bool(kept.get(key, Entry()).done) for key in keys)} of {len(keys)}")
        tries, hints = (sum(getattr(entry, what) for entry in kept.values()) for what in ("tries", "hints"))
        rows.append((str(data.get("name") or Path(file).name), str(data.get("saved", "")), *done, str(tries), str(hints)))
    return Table(("name", "saved", *[f"lesson {lesson}" for lesson in lessons], "tries", "hints"), rows)


def main(arguments: list[str]) -> None:
    files = sorted(file for pattern in arguments for file in glob.glob(pattern) or [pattern])
    if not files:
        sys.exit(__doc__)
    print(summary(files))


if __name__ == "__main__":
    main(sys.argv[1:])
