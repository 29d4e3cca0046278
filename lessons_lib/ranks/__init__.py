"""run(program, ranks=4): the same function on several real processes, recorded."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
import operator
import os
import pickle
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import sources
from ..errors import RunError
from ..hardware import Link
from ..recording import COLLECTIVE, EVENT, RECV, SEND, Recording
from . import child, launch, sending, tracebacks
from .supervise import Supervisor

MOST_RANKS = 64
MOST_ALIKE = 1024  # of which only one is a process
_PREFIX = "lessons-run-"


def run(
    program: Callable,
    *args: Any,
    ranks: int = 4,
    shapes_only: bool = False,
    throttle: Link | None = None,
    timeout: float | None = 60.0,
    alike: bool = False,
    **kwargs: Any,
) -> Recording:
    """Run program(*args, **kwargs) on every one of `ranks` processes (1 to 64), torch.distributed ready, and record it.

    Every rank is a fresh process with seed 0 (Python, numpy, torch), one thread, and RANK, WORLD_SIZE, LOCAL_RANK set as
    torchrun sets them; of the notebook's state, what the program uses travels, and its environment and import path, but no
    seed and no default of torch. What it prints appears while it runs, as "[rank 2] text". `Recording.results[r]` is what rank r
    returned.

    shapes_only: tensors have shapes and no data; nothing is sent. A tensor in a result comes back on device "meta".
    throttle: every message takes this link's time on the wall clock.
    timeout: seconds after which the program is stopped; None waits for ever.
    alike: with shapes_only, for a program that does the same on every rank (data parallel): ranks 0 and 1 run, as two of `ranks`
    (up to 1024), and what rank 0 did and returned counts for all. RunError where they differ, send messages, or leave ranks out.

    Raises RankFailed (a rank raised, died or took too long), Deadlock, Mismatch, BufferMisuse; TypeError or ValueError for
    arguments that cannot work. After any of them, and after an interrupt, no rank is left.
    """
    __tracebackhide__ = True
    error: BaseException
    try:
        world_size = _checked(program, ranks, shapes_only, throttle, timeout, alike)
        call = sending.pack(program, args, kwargs)
    except (RunError, TypeError, ValueError) as wrong:
        error = wrong
    else:
        try:
            if alike:
                return _repeated(_run(call, world_size, shapes_only, throttle, timeout, processes=min(2, world_size)), world_size)
            return _run(call, world_size, shapes_only, throttle, timeout, processes=world_size)
        except RunError as raised:
            error = raised
        except KeyboardInterrupt:
            error = KeyboardInterrupt(f"interrupted; all {world_size} ranks were stopped")
    raise tracebacks.for_learners(error) from None


def _run(
    call: bytes, world_size: int, shapes_only: bool, throttle: Link | None, timeout: float | None, processes: int
) -> Recording:
    settings = {
        "world_size": world_size,
        "shapes_only": shapes_only,
        "throttle": throttle,
        "cwd": os.getcwd(),
        "path": [os.path.abspath(entry) for entry in sys.path],
        "argv": sys.argv[:1],
        "environ": {**os.environ, **launch.environment()},
        "sources": sources.collect(),
    }
    with _folder() as folder:
        Path(folder, "program").write_bytes(call)
        Path(folder, "setup").write_bytes(pickle.dumps(settings))
        supervisor = Supervisor(folder, processes, settings, timeout)
        try:
            return supervisor.run()
        finally:
            supervisor.close()


def _repeated(few: Recording, world_size: int) -> Recording:
    """The recording of ranks 0 and 1 of `world_size`, as if every rank had done what rank 0 did."""
    events, timeless = few.events[0], [name for name in EVENT.names if name not in ("start", "end")]
    calls = events[events["kind"] == COLLECTIVE]
    sizes = {len(few.groups[number]) for number in calls["group"]}
    why = ""
    if (events["kind"] == SEND).any() or (events["kind"] == RECV).any():
        why = "the program sends messages from rank to rank"
    elif sizes - {world_size}:
        why = f"the program calls a collective of {min(sizes)} of the {world_size} ranks"
    elif any(len(own) != len(events) or (own[timeless] != events[timeless]).any() for own in few.events):
        why = "rank 1 computes or communicates something else than rank 0"
    elif any(len(own) != len(few.costs[0]) or (own != few.costs[0]).any() for own in few.costs):
        why = "rank 1 computes something else than rank 0"
    if why:
        raise RunError(f"alike=True, but {why}, so ranks are not alike. Leave it out: then every rank runs (up to {MOST_RANKS}).")
    repeated = {name: getattr(few, name)[:1] * world_size for name in ("events", "costs", "results")}
    return dataclasses.replace(few, world_size=world_size, **repeated)


@contextlib.contextmanager
def _folder():
    """A folder of this run's own; folders of launchers that were killed are removed."""
    _remove_stale()
    folder = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-")
    lock = _locked(Path(folder, "lock"))
    try:
        yield folder
    finally:
        lock.close()
        shutil.rmtree(folder, ignore_errors=True)


def _locked(path: Path):
    """An open file, locked for as long as this process lives (on Windows being open is enough)."""
    file = open(path, "w")  # noqa: SIM115
    with contextlib.suppress(ImportError, OSError):
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return file


@functools.lru_cache(maxsize=1)  # once in a process
def _remove_stale() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime > 60 and _abandoned(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _abandoned(folder: Path) -> bool:
    lock = folder / "lock"
    if not lock.exists():
        return True
    try:
        import fcntl
    except ImportError:
        lock.unlink()  # Windows refuses while it is open elsewhere
        return True
    with open(lock) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return True


# ---- arguments ---------------------------------------------------------------------------------------------------------


def _checked(program, ranks, shapes_only, throttle, timeout, alike) -> int:
    if child.inside is not None:
        raise RunError(
            f"run() was called inside rank {child.inside} of another run. A program on ranks talks to the other ranks with "
            "torch.distributed; call run() from the notebook or the script alone."
        )
    _check_program(program)
    if not isinstance(alike, bool):
        raise TypeError(f"alike={alike!r}: give True (rank 0 runs, the others do the same) or False")
    most = MOST_ALIKE if alike else MOST_RANKS
    if isinstance(ranks, bool) or not hasattr(type(ranks), "__index__"):
        raise TypeError(f"ranks={ranks!r}: give a whole number of processes from 1 to {most}, for example ranks=4")
    ranks = operator.index(ranks)
    if not 1 <= ranks <= most:
        raise ValueError(f"ranks={ranks}: from 1 to {most} are possible, for example ranks=4")
    if not isinstance(shapes_only, bool):
        raise TypeError(f"shapes_only={shapes_only!r}: give True (shapes without data) or False")
    if alike and not shapes_only:
        raise ValueError("alike=True needs shapes_only=True: with data every rank has to run. Set that too, or leave alike out")
    if throttle is not None and not isinstance(throttle, Link):
        raise TypeError(f"throttle={throttle!r}: give a Link, for example Link(bandwidth=1e9, latency=1e-4), or None")
    if throttle is not None and shapes_only:
        raise ValueError("throttle with shapes_only=True: without data no message takes any time. Leave one of them out")
    _check_timeout(timeout)
    try:
        os.getcwd()
    except OSError:
        raise ValueError("the folder in which this process works was removed. Go to another one with os.chdir(...)") from None
    return ranks


def _check_timeout(timeout) -> None:
    if timeout is None:
        return
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) and not hasattr(timeout, "__float__"):
        raise TypeError(f"timeout={timeout!r}: give a number of seconds, or None to wait for ever")
    if not (math.isfinite(timeout) and timeout > 0):
        raise ValueError(f"timeout={timeout!r}: give a number of seconds above 0, or None to wait for ever")


def _check_program(program) -> None:
    if not callable(program):
        raise TypeError(
            f"run() needs a function as its first argument, not {program!r}. Give the function itself, without calling it: "
            "run(step, x, ranks=4) calls step(x) on every rank"
        )
    inner = program
    while isinstance(inner, functools.partial):
        inner = inner.func
    if not inspect.isroutine(inner) and not isinstance(inner, type):
        inner = type(inner).__call__
    name = getattr(inner, "__name__", repr(program))
    if inspect.iscoroutinefunction(inner) or inspect.isasyncgenfunction(inner):
        raise TypeError(f"{name} is an async function: calling it does not run it. Give a plain function (def, not async def)")
    if inspect.isgeneratorfunction(inner):
        raise TypeError(f"{name} is a generator function: calling it does not run it. Return a list instead of using yield")


def _in_interactive_kernel() -> bool:
    ipython = sys.modules.get("IPython")
    return ipython is not None and ipython.get_ipython() is not None


if _in_interactive_kernel():
    launch.prepare()  # while the learner reads the next lines, torch is loaded
