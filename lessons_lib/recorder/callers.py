"""Who called torch.distributed: the line of the learner's program, whatever lies between."""

from __future__ import annotations

import sys
from pathlib import Path

from ..sources import describe, is_user_code

PACKAGE = str(Path(__file__).parents[1])
_kinds: dict = {}  # code object -> whose it is: a look at its file name, once


def calling_line() -> tuple[str, bool, str]:
    """The line of the program, whether it called torch.distributed itself, and which function of it."""
    frame, name, direct = sys._getframe(1), "", True
    while frame is not None:
        code = frame.f_code
        kind = _kinds.get(code)
        if kind is None:
            kind = _kinds[code] = _whose(code.co_filename)
        if kind == "user":
            return describe(code.co_filename, frame.f_lineno), direct, name
        if kind == "c10d" and code.co_name != "wrapper":
            name = code.co_name
        elif kind == "library":
            direct = False
        frame = frame.f_back
    return "the program", direct, name


def _whose(filename: str) -> str:
    if is_user_code(filename):
        return "user"
    if filename.startswith(PACKAGE) or filename.endswith("contextlib.py"):
        return "ours"
    return "c10d" if filename.endswith(("distributed_c10d.py", "c10d_logger.py")) else "library"
