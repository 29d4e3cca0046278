"""Which of several errors to show, and in which words: the cause first, what followed from it after."""

from __future__ import annotations

import re
import signal
import traceback
import warnings
from collections.abc import Iterable
from dataclasses import dataclass

from .. import errors, sources
from ..errors import OrderWarning, RankFailed, RunError


@dataclass(frozen=True)
class Failure:
    """One rank that cannot go on. `clock`: the logical time at which it failed."""

    rank: int
    kind: str  # "raised", "exit" (SystemExit), "load", "result", "start", "died"
    summary: str  # "ValueError: bad shape", "was killed by signal 9 (SIGKILL)"
    message: str = ""  # the whole message where it is already a sentence
    known: str = ""  # the class in errors.py, for errors of our own
    code: int | str | None = None
    place: str = ""  # "cell 3, line 5: x.view(3)"
    text: str = ""  # the stack
    secondary: bool = False  # it only says that another rank went away
    clock: int = 0


def died(rank: int, status: int, doing: str, place: str, last_words: str = "") -> Failure:
    """A process that ended without a word: `status` as subprocess has it (-9: killed by signal 9).

    `last_words`: what C++ wrote when it gave up.
    """
    if status < 0:
        try:
            name = f"signal {-status} ({signal.Signals(-status).name})"
        except ValueError:
            name = f"signal {-status}"
        text = f"rank {rank} was killed by {name}"
    else:
        text = f"rank {rank} exited with code {status} before its program returned"
    where = f"; it was at {place}" if place else f"; it was {doing}" if doing else ""
    hint = ""
    if status == -9:
        hint = "\nIf nobody did that on purpose, this machine ran out of memory: use fewer ranks or smaller tensors."
    words = f"\n{last_words}" if last_words else ""
    own = text.removeprefix(f"rank {rank} ")
    secondary = "gloo" in last_words  # it gave up because of what another rank did, or did not do
    return Failure(rank, "died", own, text + where + words + hint, text=text + where + words, secondary=secondary)


def explain(failures: Iterable[Failure], proof: RunError | None, world_size: int) -> RunError:
    """The error to raise. `proof`: what the notes of the ranks prove.

    Which ranks had ended, and which lost their connection, differs from time to time: it is not part of the message,
    because a notebook's stored output must not.
    """
    failures = sorted(failures, key=lambda f: (f.clock, f.rank))
    primary = [f for f in failures if not f.secondary]
    if proof is not None and (not primary or isinstance(proof, errors.Mismatch) and all(f.kind == "died" for f in primary)):
        return _with_details(proof, failures, [])
    first, *rest = primary or failures
    same = [f for f in rest if f.kind == first.kind and _anonymous(f.summary) == _anonymous(first.summary)]
    error = _error_of(first)
    lines = [str(error)]
    if same:
        lines.append(f"{_ranks(f.rank for f in same)} failed in the same way.")
    different = [f for f in rest if not f.secondary and f not in same]
    for failure in different:
        lines.append(f"rank {failure.rank} failed too: {failure.summary}" + (f" ({failure.place})" if failure.place else ""))
    untouched = world_size - len([first, *same, *different])
    if untouched:
        lines.append("The other rank was stopped." if untouched == 1 else "The other ranks were stopped.")
    whole = type(error)("\n".join(lines))
    return _with_details(whole, [first, *same, *different], [f for f in failures if f.secondary and f not in (first, *same)], first)


def _error_of(failure: Failure) -> RunError:
    rank = failure.rank
    if failure.known:
        kind = getattr(errors, failure.known)
        return kind(failure.message)
    if failure.kind == "died":
        return RankFailed(failure.message)
    if failure.kind == "exit":
        return RankFailed(f"rank {rank} called sys.exit({failure.code!r}) before its program returned.\n{failure.text}")
    if failure.kind == "result":
        return RankFailed(f"rank {rank}: {failure.message.removeprefix('TypeError: ')}")
    if failure.kind == "load":
        return RankFailed(f"rank {rank} could not load the program: {failure.summary}\n{failure.text}")
    if failure.kind == "start":
        return RankFailed(f"rank {rank} could not start: {failure.summary}\n{failure.text}")
    return RankFailed(f"rank {rank} raised {failure.summary}" + (f"\n{failure.text}" if failure.text else ""))


def _anonymous(text: str) -> str:
    """Two ranks make the same mistake although each names itself."""
    return re.sub(r"\b[Rr]ank \d+", "rank", text)


def _with_details(error: RunError, failures: list[Failure], consequences: list[Failure], first: Failure | None = None) -> RunError:
    """Attributes for programs (rank, ranks, traceback_text, others) and, where Python has notes, a note of what followed."""
    error.ranks = [f.rank for f in failures]
    error.rank = first.rank if first else (error.ranks or [None])[0]
    error.traceback_text = f"{first.text}\n{first.summary}".strip() if first else ""
    error.others = {f.rank: f.summary for f in consequences}
    if consequences and hasattr(error, "add_note"):
        error.add_note("What followed from it: " + "; ".join(f"rank {f.rank}: {f.summary[:200]}" for f in consequences))
    return error


def unreadable(rank: int, why: str) -> str:
    return (
        f"the result of rank {rank} cannot be read here: {why}. What to do: return what lives without process groups: tensors, "
        "numbers, strings, a model's state_dict(); for DistributedDataParallel its .module, for a sharded tensor its .to_local()."
    )


def timed_out(seconds: float, stacks: dict[int, tuple[str, str]], doing: dict[int, str], finished: int) -> RankFailed:
    """`stacks[rank]` = (place, stack text) of every rank that had not finished; `doing[rank]` its last communication."""
    ranks = sorted(stacks)
    state = "no rank had finished" if not finished else f"{finished} of {finished + len(ranks)} ranks had finished"
    lines = [f"the program did not finish within {seconds:g} s; {state}."]
    for rank in ranks[:8]:
        place, text = stacks[rank]
        where = f" is at {place}" if place else " did not say where it is"
        lines.append(f"rank {rank}{where}" + (f"; {doing[rank]}" if doing.get(rank) else ""))
        if text:
            lines.append(text)
    if len(ranks) > 8:
        lines.append(f"... and {len(ranks) - 8} more ranks: {', '.join(map(str, ranks[8:]))}")
    lines.append("What to do: look at these lines for a loop that does not end, or allow more time with run(..., timeout=seconds).")
    error = RankFailed("\n".join(lines))
    error.rank, error.ranks, error.others = ranks[0], ranks, {}
    error.traceback_text = "\n".join(f"rank {r}:\n{stacks[r][1]}" for r in ranks)
    return error


def _ranks(ranks: Iterable[int]) -> str:
    ranks = [str(r) for r in ranks]
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(ranks[:-1])} and {ranks[-1]}"


def warn_of_order(text: str) -> None:
    """An OrderWarning, shown with the learner's own line, and without the path of a temporary file."""
    for frame in reversed(traceback.extract_stack()):
        if sources.is_user_code(frame.filename):
            warnings.warn_explicit(text, OrderWarning, sources.title(frame.filename), frame.lineno or 1)
            return
    warnings.warn(text, OrderWarning, stacklevel=2)
