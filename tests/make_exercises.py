"""Make the exercises from the solutions: every region between the marks becomes a blank, outputs go.

    python tests/make_exercises.py          write exercises/ from solutions/
    python tests/make_exercises.py --check  write nothing; fail if a file is not what would be written

It does what nbgrader's generate_assignment does to a notebook with its default settings, so that an instructor who uses nbgrader
hands out the same blanks; tests/test_exercises.py holds the two against each other.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"
STUB = ("# YOUR CODE HERE", "raise NotImplementedError()")  # nbgrader's


def blank(source: str) -> str:
    """`source` with every marked region replaced by the stub, as deep as its first mark. ValueError if marks do not pair."""
    lines, inside = [], False
    for line in source.split("\n"):
        if BEGIN in line:
            if inside:
                raise ValueError(f"{BEGIN} stands twice before {END} in the cell\n{source}")
            inside = True
            indent = re.match(r"\s*", line).group()
            lines += [indent + stub for stub in STUB]
        elif END in line:
            if not inside:
                raise ValueError(f"{END} stands without {BEGIN} in the cell\n{source}")
            inside = False
        elif not inside:
            lines.append(line)
    if inside:
        raise ValueError(f"{END} is missing in the cell\n{source}")
    return "\n".join(lines)


def exercise_of(solution):
    """The exercise notebook for a solution notebook (nbformat nodes). ValueError if a blank would not be one of nbgrader's."""
    made = nbformat.from_dict(solution)
    for cell in made.cells:
        marked = BEGIN in cell.source or END in cell.source
        if marked != bool(cell.metadata.get("nbgrader", {}).get("solution")):
            raise ValueError(f"Marks and nbgrader's metadata (solution: true) go together; not so in the cell\n{cell.source}")
        cell.source = blank(cell.source)
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
            cell.metadata = nbformat.from_dict({"nbgrader": cell.metadata.nbgrader} if "nbgrader" in cell.metadata else {})
    nbformat.validate(made)
    return made


def text_of(notebook) -> str:
    return nbformat.writes(notebook) + "\n"


def made(solutions: Path) -> dict[str, str]:
    """File name -> text, for every solution in the folder."""
    found = sorted(solutions.glob("*.ipynb"))
    return {path.name: text_of(exercise_of(nbformat.reads(path.read_text(encoding="utf-8"), as_version=4))) for path in found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file is not what would be written")
    only_check = parser.parse_args().check
    folder = ROOT / "exercises"
    folder.mkdir(exist_ok=True)
    wanted = made(ROOT / "solutions")
    there = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.ipynb")}
    stale = sorted({name for name in wanted.keys() | there.keys() if wanted.get(name) != there.get(name)})
    if only_check:
        sys.exit(f"not made from the solutions: {', '.join(stale)}; run `make exercises`" if stale else 0)
    for name in stale:
        if name in wanted:
            (folder / name).write_text(wanted[name], encoding="utf-8", newline="\n")
        else:
            (folder / name).unlink()
        print(f"exercises/{name}: {'written' if name in wanted else 'deleted, it has no solution'}")


if __name__ == "__main__":
    main()
