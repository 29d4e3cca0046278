"""Running an answer: every way in which a learner's code can break becomes a sentence.

The answer runs in ranks, never in the kernel: what it prints, raises, changes or never finishes stays there.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import math
import os
import re
import reprlib
import secrets
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import RunError
from ..ranks import run
from ..recording import Recording
from . import inside
from .exercise import Exercise, Wrong
from .inside import Draw, Part, Returned, State

SECONDS = 10.0  # for one run, more on a busy machine; a right answer alone needs a tenth of a second
_BUSIEST = 6.0  # times SECONDS, at most
_LINES, _WIDTH = 8, 160  # of what the learner's code printed, shown when it fails
_MESSAGE = 40  # lines of an error shown


def draw(
    *shape: int,
    dtype: str = "float32",
    largest: int = 99,
    requires_grad: bool = False,
    smallest: int | None = None,
    start: Sequence[int] = (),
) -> Draw:
    """A fresh random tensor."""
    return Draw(fresh(), shape, dtype, largest, requires_grad, smallest, tuple(start))


def parts(whole: Draw, n: int, axis: int = 0, requires_grad: bool = True) -> list[Part]:
    """A tensor cut into n equal pieces, one for each rank, each wanting a gradient."""
    fields = {**vars(whole), "requires_grad": requires_grad}
    return [Part(**fields, axis=axis, rank=rank, length=whole.shape[axis] // n) for rank in range(n)]


def fresh() -> int:
    """A new seed: for Net(build, fresh())."""
    return secrets.randbits(62)


def time_limit() -> float:
    """Seconds for one run: LESSONS_CHECK_SECONDS if set; else 10, and more while others want the processors, too."""
    with contextlib.suppress(KeyError, ValueError):
        seconds = float(os.environ["LESSONS_CHECK_SECONDS"])
        if math.isfinite(seconds) and seconds > 0:
            return seconds
    waiting = os.getloadavg()[0] / (os.cpu_count() or 1) if hasattr(os, "getloadavg") else 1.0  # Windows does not say
    return SECONDS * min(max(waiting, 1.0), _BUSIEST)


@dataclass(frozen=True)
class Case:
    """One run of an answer. `inputs[rank]` are its arguments (None: the rank sat out), `returned[rank]` what came."""

    trial: Trial
    ranks: int
    inputs: Sequence[tuple | None]
    returned: list[Returned | None]
    recording: Recording

    @property
    def active(self) -> list[int]:
        """The ranks that took part."""
        return [rank for rank, given in enumerate(self.inputs) if given is not None]

    def array(self, rank: int, position: int = 0):
        """An input of a rank, as it was before the call."""
        return self.inputs[rank][position].array()

    def state(self, rank: int, position: int = 0) -> State:
        """What an input with gradients holds after the call: .values and .gradients by name."""
        return self.returned[rank].states[position]

    def value(self, rank: int) -> Any:
        return self.returned[rank].value

    def wrong(self, *sentences: str) -> Wrong:
        return self.trial.wrong(self.ranks, *sentences)


class PrintsOfRanks(io.StringIO):
    """Keeps what ranks print; what a run itself has to say (that it starts slowly) goes on to the cell."""

    def __init__(self, cell):
        super().__init__()
        self.cell = cell

    def write(self, text: str) -> int:
        return super().write(text) if text.startswith("[rank ") else self.cell.write(text)

    def flush(self) -> None:
        self.cell.flush()


class Trial:
    """One check of one answer: runs it as often as the judge asks."""

    def __init__(self, exercise: Exercise, answer: Callable):
        self.exercise, self.answer = exercise, answer
        self.right: list[int] = []  # numbers of ranks with which the answer was right
        self.printed = PrintsOfRanks(sys.stdout)
        _check_callable(exercise, answer)

    def run(
        self, inputs: Sequence[tuple | None], may_change: Sequence[int] = (), upstream: Sequence[Draw | None] | None = None
    ) -> Case:
        """Call the answer on len(inputs) ranks, with inputs[rank] on each. `may_change`: arguments that may be overwritten.

        With `upstream`, go backward through what it returns, from the gradient upstream[rank]: see gradients.py.
        """
        ranks = len(inputs)
        recording = self._recorded(ranks, inside.call, list(inputs), *([] if upstream is None else [list(upstream)]))
        case = Case(self, ranks, inputs, recording.results, recording)
        for rank in case.active:
            changed = [n for n in case.returned[rank].changed if n not in may_change]
            if changed:
                name = self.exercise.parameters[changed[0]]
                raise case.wrong(
                    f"Rank {rank}: your function changed its argument `{name}`, which belongs to the caller.",
                    "Receive into, or add up in, a tensor of your own: torch.empty_like(...) or .clone() makes one.",
                )
        return case

    def values(self, inputs: Sequence[tuple]) -> list[Any]:
        """What an answer that does not communicate returns for each set of arguments."""
        return self._recorded(1, inside.call_each, list(inputs)).results[0]

    def at_real_size(self, make: Callable, arguments: Sequence, ranks: int, steps: int = 1) -> Recording:
        """A recording of the answer on make(*arguments), a tuple, with shapes and no data: for what a cluster would make of it.

        `make` is a function of a module. The answer must do the same on every rank. With `steps` it is called so often, always
        with the same arguments, and gradients are put away in between.
        """
        return self._recorded(ranks, inside.call_shapes, make, list(arguments), steps, shapes_only=True, alike=True)

    def passed(self, ranks: int) -> None:
        """Note that the answer is right with so many ranks."""
        self.right.append(ranks)

    def wrong(self, ranks: int, *sentences: str) -> Wrong:
        """The exception for an answer that is wrong with so many ranks."""
        lines = [f"With {_ranks(ranks)}:" if ranks > 1 else "", *sentences]
        others = sorted(set(self.right) - {ranks, 1})
        if others:
            lines.insert(0, f"With {_listed(others)} ranks it is right.")
            if len(others) > 1 and all(_power_of_two(n) for n in others) and not _power_of_two(ranks):
                lines.append(f"{ranks} is not a power of two: does your code count on one?")
        return Wrong("\n".join(line for line in lines if line))

    def _recorded(self, ranks: int, program: Callable, *arguments, **options) -> Recording:
        # A run prints, and warns about lines that differ between ranks: here the values tell, so neither is for the cell.
        with contextlib.redirect_stdout(self.printed), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return run(program, self.answer, *arguments, ranks=ranks, timeout=time_limit(), **options)
            except RunError as error:
                problem: Exception = error
            except TypeError as error:
                raise Wrong(str(error)) from None
        if str(problem).splitlines()[0].endswith("raised NotImplementedError"):
            raise Wrong(
                f"{self.exercise.name} is still blank. Write your code in place of `raise NotImplementedError`, run that cell, "
                "then this one again."
            )
        raise self.wrong(ranks, *_told(str(problem)))

    def what_it_printed(self) -> str:
        """The first lines that the answer printed, for a failure; "" if none."""
        lines = self.printed.getvalue().splitlines()
        if not lines:
            return ""
        shown = [f"  {line[:_WIDTH]}{' ...' if len(line) > _WIDTH else ''}" for line in lines[:_LINES]]
        rest = f" (the first {_LINES} of {len(lines):,} lines)" if len(lines) > _LINES else ""
        return "\n".join([f"Your code printed{rest}:", *shown])


def _told(message: str) -> list[str]:
    """An error of a run, bounded, and with advice that fits a check."""
    message = message.replace("`.value` of the result", "the result")  # `value` is ours, not the learner's
    lines = [line if len(line) < 2000 else f"{line[:2000]} ..." for line in message.splitlines()]
    if lines[0].startswith("the program did not finish"):
        lines[0] = f"Your code {lines[0].removeprefix('the program ')}"
        lines[-1] = "Look at these lines for a loop that does not end."
    if len(lines) > _MESSAGE:
        lines[_MESSAGE:] = [f"... and {len(lines) - _MESSAGE} more lines"]
    return lines


def _check_callable(exercise: Exercise, answer: Any) -> None:
    """Wrong, unless `answer` can be called as the exercise says."""
    name = exercise.name
    if not callable(answer):
        raise Wrong(
            f"check() needs your function itself, and got {shown(answer)}. Give it without calling it: check({name}), "
            f"not check({name}(...))."
        )
    if inspect.isgeneratorfunction(answer):
        raise Wrong(f"{name} is a generator function, because of its `yield`: calling it does not run it. Use return.")
    if inspect.iscoroutinefunction(answer):
        raise Wrong(f"{name} is an async function: calling it does not run it. Write def, not async def.")
    try:
        inspect.signature(answer).bind(*exercise.parameters)
    except TypeError:
        mine = str(inspect.signature(answer))
        raise Wrong(f"{name} is called as {exercise.call}, but yours takes {mine}. Change its parameters to fit.") from None
    except ValueError:
        pass  # something written in C: the call will tell


def shown(value: Any) -> str:
    """A value in a few words, whatever it is."""
    short = reprlib.Repr()
    short.maxother = short.maxstring = short.maxlong = 60
    try:
        text = re.sub(r" at 0x[0-9a-fA-F]+", "", " ".join(short.repr(value).split()))
    except Exception:
        text = "(something that cannot be shown)"
    return f"{text if len(text) <= 120 else text[:120] + ' ...'} (of type {type(value).__name__})"


def _ranks(n: int) -> str:
    return f"{n} rank{'s' if n > 1 else ''}"


def _listed(numbers: Sequence[int]) -> str:
    words = [str(n) for n in numbers]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _power_of_two(n: int) -> bool:
    return n & (n - 1) == 0
