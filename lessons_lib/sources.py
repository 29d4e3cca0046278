"""Where a line of a program is, in words a learner recognises: "cell 3, line 5: dist.recv(x, 1)".

Notebook cells are not files: the kernel keeps their text. `collect` gathers it, the text travels to the ranks with the
program, and `install` puts it where Python's own tracebacks look (linecache).
"""

from __future__ import annotations

import functools
import linecache
import os
import sys
import sysconfig
from dataclasses import dataclass, field

_HOME = os.path.dirname(os.path.abspath(__file__))
_OURS_TO_SHOW = os.path.join(_HOME, "parallel") + os.sep  # the lessons' finished code reads like a learner's own
_INTERACTIVE = ("<stdin>", "<ipython-input", "<python-input")  # what Python and IPython call text typed at a prompt
_KEPT_CELLS = 1000


@dataclass(frozen=True)
class Sources:
    """Text of code that is in no file: `titles[filename]` is "cell 3", `lines[filename]` the lines of that cell."""

    titles: dict[str, str] = field(default_factory=dict)
    lines: dict[str, list[str]] = field(default_factory=dict)
    command: bool = False  # the main program came from `python -c`, whose file name is "<string>"


_installed = Sources()


def collect() -> Sources:
    """Titles and text of the cells of this notebook (the newest thousand) and of other code that linecache alone knows."""
    titles = {name: f"cell {number}" for name, number in list(_cell_numbers().items())[-_KEPT_CELLS:]}
    lines = {}
    for name, entry in list(linecache.cache.items()):
        if len(entry) == 4 and entry[1] is None:  # an entry without a time of change is not a file
            lines[name] = list(entry[2])
    cells = {name: text for name, text in lines.items() if name in titles}
    others = {name: text for name, text in list(lines.items())[-_KEPT_CELLS:] if name not in titles}
    titles = {**_installed.titles, **titles}
    return Sources(titles, {**_installed.lines, **others, **cells}, sys.argv[:1] == ["-c"])


def _cell_numbers() -> dict[str, int]:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return dict(getattr(getattr(shell, "compile", None), "_filename_map", {}))


def install(sources: Sources) -> None:
    """Make the launcher's cells known in this process: to tracebacks, and to the functions below."""
    global _installed
    _installed = sources
    for name, text in sources.lines.items():
        linecache.cache[name] = (sum(map(len, text)), None, text, name)
    is_user_code.cache_clear()


def title(filename: str) -> str:
    """What a learner calls this code: "cell 3", "train.py", "the command line"."""
    number = _installed.titles.get(filename)
    if number is None:
        found = _cell_numbers().get(filename)
        number = None if found is None else f"cell {found}"
    if number is not None:
        return number
    if filename == "<string>":
        return "the command line"
    return filename if filename.startswith("<") else os.path.basename(filename)


def describe(filename: str, lineno: int | None) -> str:
    """ "cell 3, line 5: dist.recv(x, 1)"; without the text where it is not known."""
    text = linecache.getline(filename, lineno).strip() if lineno else ""
    where = f"{title(filename)}, line {lineno}" if lineno else title(filename)
    return f"{where}: {text}" if text else where


@functools.lru_cache(maxsize=4096)
def is_user_code(filename: str) -> bool:
    """Whether a learner wrote this: neither Python's library, nor an installed package, nor the workings of lessons_lib."""
    if filename in _installed.titles or filename.startswith(_INTERACTIVE):
        return True
    if filename.startswith("<"):
        return filename == "<string>" and (_installed.command or sys.argv[:1] == ["-c"])
    path = os.path.abspath(filename)
    if path.startswith(_HOME + os.sep):
        return path.startswith(_OURS_TO_SHOW)
    if {"site-packages", "dist-packages"} & set(path.split(os.sep)):
        return False
    return not path.startswith(_library_folders())


@functools.lru_cache(maxsize=1)
def _library_folders() -> tuple[str, ...]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    found = {sysconfig.get_path(name) for name in names} | {os.path.dirname(os.__file__)}
    return tuple(os.path.abspath(folder) + os.sep for folder in found if folder)
