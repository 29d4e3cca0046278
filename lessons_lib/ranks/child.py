"""What happens inside a rank: set up, run the program, report.

A rank hears from the launcher through one pipe (lines of JSON: setup, go, stack) and speaks through another (printing.py).
Results are too large for pipes: they go through a file. When the launcher's end of the first pipe closes, the launcher is
gone, and the rank ends at once.
"""

from __future__ import annotations

import faulthandler
import json
import os
import pickle
import random
import signal
import sys
import threading
import time
import types
import warnings
from pathlib import Path

from .. import errors, sources
from . import sending, tracebacks
from .printing import ERR, OUT, Channel

LAUNCHER_GONE = 70  # exit code of a rank whose launcher ended first
inside: int | None = None  # the number of the rank that this process is; None: not a rank


def main(token: bytes, forked: bool = False) -> None:
    """Never returns. File descriptor 0 brings orders; 1 and 2 lead to the launcher."""
    _ignore_interrupts()
    if not forked and hasattr(os, "setpgid"):
        os.setpgid(0, 0)  # what this rank starts can then be ended with it; the template does that for forked ranks
    orders = os.fdopen(os.dup(0), "rb")
    channel = Channel(os.dup(1), token)
    _replace_streams(channel)
    setup = json.loads(orders.readline() or b"null")
    if setup is None:
        os._exit(LAUNCHER_GONE)
    go: dict = {}
    ready = threading.Event()
    threading.Thread(target=_listen, args=(orders, channel, go, ready, threading.get_ident()), daemon=True).start()
    code = 0
    try:
        _work(setup, channel, go, ready)
    except BaseException as error:  # our own workings failed: say so, do not vanish
        _report(channel, "start", error, 0)
        code = 1
    finally:
        _flush()
        os._exit(code)


def _work(setup: dict, channel: Channel, go: dict, ready: threading.Event) -> None:
    rank, folder = setup["rank"], Path(setup["folder"])
    state = pickle.loads((folder / "setup").read_bytes())
    _surroundings(rank, state, folder)
    try:
        program, args, kwargs = sending.unpack((folder / "program").read_bytes())
    except BaseException as error:
        return _fail(channel, "load", error, 0)
    import torch

    from ..recorder import Recorder

    torch.set_num_threads(1)
    _seed()
    channel.message(**{"is": "ready"})
    ready.wait()
    recorder = Recorder(rank, state["world_size"], folder, state["shapes_only"], state["throttle"])
    channel.position = lambda: recorder.position
    try:
        recorder.start()
        channel.message(**{"is": "running"})
        result = program(*args, **kwargs)
    except SystemExit as error:
        if error.code not in (None, 0):
            return _fail(channel, "exit", error, recorder.position, recorder)
        result = None
    except BaseException as error:
        return _fail(channel, "raised", recorder.better(error), recorder.position, recorder)
    _flush()
    channel.message(**{"is": "returned"})
    try:
        log = recorder.finish()
    except BaseException as error:
        return _fail(channel, "raised", error, recorder.position, recorder)
    try:
        sending.write_result(str(folder / f"result.{rank}"), log, result)
    except BaseException as error:
        return _fail(channel, "result", error, recorder.position)
    _flush()
    channel.message(**{"is": "done"})
    if not state["shapes_only"]:  # neighbours may still read from our sockets
        _stay()


def _surroundings(rank: int, state: dict, folder: Path) -> None:
    """Make this process look as the launcher does: folder, import path, environment, text of the cells."""
    global inside
    inside = rank
    os.environ.clear()
    os.environ.update(state["environ"], RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ.update(WORLD_SIZE=str(state["world_size"]), LOCAL_WORLD_SIZE=str(state["world_size"]))
    sys.path[:] = state["path"]
    sys.argv[:] = state["argv"]
    try:
        os.chdir(state["cwd"])
    except OSError:
        pass  # the folder was removed: the program may not need it
    sys.modules["__main__"] = types.ModuleType("__main__")
    sources.install(state["sources"])
    warnings.formatwarning = _one_line_warning
    faulthandler.enable(open(folder / f"crash.{rank}", "w"), all_threads=False)  # noqa: SIM115 - open until the end
    if hasattr(faulthandler, "register"):
        stacks = open(folder / f"stack.{rank}", "w")  # noqa: SIM115
        faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)


def _seed() -> None:
    """Every rank starts from seed 0, so that what a notebook shows is the same every time it runs."""
    import numpy
    import torch

    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


def _listen(orders, channel: Channel, go: dict, ready: threading.Event, main_thread: int) -> None:
    for line in orders:
        order = json.loads(line)
        if "start" in order:
            go.update(order)
            ready.set()
        elif "stack" in order:
            frame = sys._current_frames().get(main_thread)
            stack = tracebacks.of_frame(frame) if frame else []
            channel.message(**{"is": "stack", "place": tracebacks.place(stack), "text": tracebacks.stack_text(stack)})
    if hasattr(os, "getpgrp") and os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(LAUNCHER_GONE)


def _fail(channel: Channel, kind: str, error: BaseException, position: int, recorder=None) -> None:
    """Report, then stay until the launcher ends us: a rank that leaves would make its neighbours fail too."""
    _flush()
    _report(channel, kind, error, position)
    if recorder is not None:
        recorder.abandon()
    _stay()


def _stay() -> None:
    """Until the launcher ends this process."""
    while True:
        time.sleep(3600)


def _report(channel: Channel, kind: str, error: BaseException, position: int) -> None:
    known = type(error).__name__ if isinstance(error, errors.RunError) and hasattr(errors, type(error).__name__) else ""
    channel.message(
        **{
            "is": "failed",
            "kind": kind,
            "summary": tracebacks.summary(error),
            "message": str(error) if known or kind == "result" else "",
            "known": known,
            "code": error.code if isinstance(getattr(error, "code", None), (int, str)) else None,
            "place": tracebacks.place(tracebacks.of_exception(error)),
            "text": tracebacks.exception_text(error),
            "secondary": tracebacks.is_secondary(error),
            "position": position,
        }
    )


# ---- streams and signals ----------------------------------------------------------------------------------------------


def _ignore_interrupts() -> None:
    """The kernel alone answers an interrupt: it stops the ranks itself."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _replace_streams(channel: Channel) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = channel.text_stream(OUT)
    sys.stderr = sys.__stderr__ = channel.text_stream(ERR)
    libc = _libc()
    for name in ("stdout", "__stdoutp"):  # glibc's name, macOS's name
        try:
            import ctypes

            libc.setvbuf(ctypes.c_void_p.in_dll(libc, name), None, 1, 0)  # 1: write at the end of every line
        except (AttributeError, ValueError, OSError, ImportError):
            continue


def _libc():
    try:
        import ctypes

        return ctypes.CDLL(None)
    except (ImportError, OSError, TypeError):  # Windows has no such library
        return None


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        try:
            stream.flush()
        except Exception:
            continue  # the program closed or replaced it
    try:
        _libc().fflush(None)
    except Exception:
        return


def _one_line_warning(message, category, filename, lineno, line=None) -> str:
    """No path of a temporary file, which is another one every time."""
    return f"{category.__name__}: {message} ({sources.describe(filename, lineno)})\n"
