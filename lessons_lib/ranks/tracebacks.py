"""Python stacks and exceptions of a rank, told in the learner's own lines: no frame of the launcher or the recorder."""

from __future__ import annotations

import functools
import os
import re
import sys
import traceback
from types import FrameType, TracebackType

from .. import sources

_HOME = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_MESSAGE = 10_000  # characters kept of the message of an exception
_CHAIN = 20  # exceptions told, each the origin of the one before
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+(?=>|\b)")
_FRAMES = 12  # frames shown of one stack; a recursion has thousands
_MACHINERY = (
    "torch/_compile.py",
    "torch/_dynamo/eval_frame.py",
    "torch/_ops.py",
    "torch/utils/_python_dispatch.py",
    "torch/distributed/c10d_logger.py",
    "typing_extensions.py",
)
_LOST = re.compile(  # what gloo and the rendezvous say when another rank is the cause
    r"(connection|socket).{0,40}(closed|reset|refused|broken)|closed by peer|reset by peer|broken pipe|timed? ?out|read error|"
    r"connection aborted|no route to host|errno 10[0-9]|store.{0,60}(unreachable|wait)",
    re.IGNORECASE | re.DOTALL,
)


def is_hidden(filename: str) -> bool:
    """Whether a frame belongs to lessons_lib's own workings, or to the machinery through which it sees operators."""
    if filename.startswith(_HOME):
        return not sources.is_user_code(filename)
    return filename.startswith("<frozen") or filename.replace(os.sep, "/").endswith(_MACHINERY)


def stack_text(stack: list[traceback.FrameSummary]) -> str:
    """One entry a frame, outermost first: "  cell 3, line 5, in step" and the line's text below it."""
    shown = [f for f in stack if not is_hidden(f.filename)]
    first = next((i for i, f in enumerate(shown) if sources.is_user_code(f.filename)), None)
    shown = shown[first:] if first is not None else []
    rows = []
    for frame in shown if len(shown) <= _FRAMES else [*shown[: _FRAMES // 2], None, *shown[-_FRAMES // 2 :]]:
        if frame is None:
            rows.append(f"  ... {len(shown) - _FRAMES:,} more frames ...")
            continue
        where = "" if frame.name in ("<module>", "<lambda>") else f", in {frame.name}"
        rows.append(f"  {sources.title(frame.filename)}, line {frame.lineno}{where}")
        if frame.line:
            rows.append(f"    {frame.line.strip()}")
    return "\n".join(rows)


def place(stack: list[traceback.FrameSummary]) -> str:
    """The innermost line of the learner's own: "cell 3, line 5: x.view(3)"; "" if there is none."""
    for frame in reversed(stack):
        if sources.is_user_code(frame.filename):
            return sources.describe(frame.filename, frame.lineno)
    return ""


def of_frame(frame: FrameType) -> list[traceback.FrameSummary]:
    return list(traceback.extract_stack(frame))


def of_exception(error: BaseException) -> list[traceback.FrameSummary]:
    return list(traceback.extract_tb(error.__traceback__))


def exception_text(error: BaseException) -> str:
    """The stack of an exception, then each exception that it came of or contains, with its stack."""
    seen: set[int] = set()
    parts: list[str] = []

    def tell(error: BaseException, how: str) -> None:
        seen.add(id(error))
        parts.extend([f"{how} {summary(error)}" if how else "", stack_text(of_exception(error))])
        for part in getattr(error, "exceptions", ()):  # an ExceptionGroup
            if isinstance(part, BaseException) and id(part) not in seen:
                tell(part, "It contains")
        origin = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if origin is not None and id(origin) not in seen and len(seen) < _CHAIN:
            tell(origin, "It came of")

    tell(error, "")
    return "\n".join(part for part in parts if part)


def summary(error: BaseException) -> str:
    """ "ValueError: bad shape", with its notes; the name alone if there is no message."""
    text = _message(error)
    notes = getattr(error, "__notes__", ())
    text = "\n".join([text, *map(str, notes)] if isinstance(notes, (list, tuple)) else [text])
    if len(text) > _MESSAGE:
        text = f"{text[:_MESSAGE]} ... ({len(text) - _MESSAGE:,} more characters)"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _message(error: BaseException) -> str:
    """Addresses left out: they differ every time, and no reader needs them."""
    try:
        return _ADDRESS.sub("", str(error))
    except Exception:
        return "(its message cannot be shown)"


def is_secondary(error: BaseException) -> bool:
    """Whether an exception only tells what another rank did: gloo's errors, and a rendezvous that lost its partner."""
    if not isinstance(error, (RuntimeError, ConnectionError)):
        return False
    text, names = _message(error), {cls.__name__ for cls in type(error).__mro__}
    if "gloo" in text:
        return True
    from_torch = bool(names & {"DistError", "DistBackendError", "DistNetworkError", "DistStoreError"})
    from_torch = from_torch or any("torch" in f.filename.split(os.sep) for f in of_exception(error)[-1:])
    return from_torch and bool(_LOST.search(text))


def for_learners(error: BaseException) -> BaseException:
    """The same error, as if it came out of the learner's own line: no frame of this library, neither here nor in IPython."""
    error._render_traceback_ = functools.partial(_in_ipython, error)  # IPython asks an exception for this
    return error.with_traceback(None)


def _in_ipython(error: BaseException) -> list[str]:
    shell = sys.modules["IPython"].get_ipython()
    trail, here = [], error.__traceback__
    while here is not None:
        trail.append(here)
        here = here.tb_next
    while len(trail) > 1 and is_hidden(trail[-1].tb_frame.f_code.co_filename):
        trail.pop()
    for tb in reversed(trail):
        here = TracebackType(here, tb.tb_frame, tb.tb_lasti, tb.tb_lineno)
    return shell.InteractiveTB.structured_traceback(type(error), error, here)


_FAULT = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)$')


def of_faulthandler(text: str) -> list[traceback.FrameSummary]:
    """The learner's stack in what faulthandler wrote (newest frame first, one block a thread); [] if there is none."""
    best: list[traceback.FrameSummary] = []
    for block in text.split("\n\n"):
        found = [m for m in map(_FAULT.match, block.splitlines()) if m]
        stack = [traceback.FrameSummary(m["file"], int(m["line"]), m["name"]) for m in reversed(found)]
        if any(sources.is_user_code(f.filename) for f in stack) and not best:
            best = stack
    return best
