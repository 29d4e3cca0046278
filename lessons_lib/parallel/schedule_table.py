"""The table of a schedule: (rank, time, kind, microbatch, chunk, duration), and what follows from it. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import lcm
from numbers import Real
from typing import NamedTuple

from .actions import Action, needs, orders_from, shown, size_of
from .known_schedules import recognise_orders


class Cell(NamedTuple):
    """One row of the table: `rank` starts `kind` of `microbatch` in `chunk` at `time`, and is busy for `duration`."""

    rank: int
    time: Real
    kind: str
    microbatch: int
    chunk: int = 0
    duration: Real = 1

    @property
    def end(self):
        return self.time + self.duration

    @property
    def action(self) -> Action:
        return Action(self.kind, self.microbatch, self.chunk)


@dataclass(frozen=True)
class Schedule:
    """The table: `cells` by rank, then by time. `hop` is the time a message takes from one rank to the next.

    Nothing here says that it can run: check_schedule does. timed() makes only such as can.
    """

    ranks: int
    cells: tuple[Cell, ...]
    hop: Real = 0

    @cached_property
    def orders(self) -> list[list[Action]]:
        """What each rank runs, in the order of the times."""
        rows: list[list[Action]] = [[] for _ in range(self.ranks)]
        for cell in self.cells:
            rows[cell.rank].append(cell.action)
        return rows

    @cached_property
    def _size(self) -> tuple[int, int, bool]:
        return size_of(self.orders)

    @property
    def microbatches(self) -> int:
        return self._size[0]

    @property
    def chunks(self) -> int:
        """Pieces of the model on each rank."""
        return self._size[1]

    @property
    def split(self) -> bool:
        """Whether backward is split: B is then the gradient of the input alone, and W that of the weights."""
        return self._size[2]

    @cached_property
    def makespan(self):
        """From 0 to the end of the last action: the step."""
        return max((cell.end for cell in self.cells), default=0)

    @cached_property
    def busy(self) -> list:
        """Time in which each rank computes."""
        return [sum(cell.duration for cell in self.cells if cell.rank == rank) for rank in range(self.ranks)]

    @property
    def idle(self) -> list:
        """Time of the step in which each rank does nothing: the bubble."""
        return [self.makespan - busy for busy in self.busy]

    @property
    def ideal(self):
        """The step if nobody waited and all ranks had the same to do: all work / ranks."""
        return _over(sum(self.busy), self.ranks)

    @property
    def bubble_overhead(self) -> float:
        """(step - ideal) / ideal: how much longer than ideal. (p-1)/m under GPipe and 1F1B with equal stages."""
        return float(_over(self.makespan - self.ideal, self.ideal))

    @property
    def idle_share(self) -> float:
        """(step - ideal) / step: the part of the step that ranks spend idle. (p-1)/(m+p-1) under GPipe and 1F1B."""
        return float(_over(self.makespan - self.ideal, self.makespan))

    @property
    def peak_in_flight(self) -> list[int]:
        """For each rank: the most microbatches (one counts once in every chunk) whose F began and whose B has not ended."""
        return [_peak(order, "B") for order in self.orders]

    @property
    def peak_kept(self) -> list[int]:
        """The same until the last gradient: where backward is split, something is kept for W after B has ended."""
        return [_peak(order, "W" if self.split else "B") for order in self.orders]

    @property
    def messages(self) -> int:
        """Messages between ranks in one step: one a microbatch and direction at every boundary between two ranks."""
        return sum(
            other != rank
            for rank, order in enumerate(self.orders)
            for one in order
            for other, _ in needs(one, rank, self.ranks, self.chunks)
        )

    def __repr__(self) -> str:
        return f"{self.summary}\n{self.text}"

    def _repr_html_(self) -> str:
        """A picture in a notebook: drawn by plots, which is imported only then."""
        from .. import plots

        return plots.image(plots.schedule_svg(self), self.summary)

    @property
    def summary(self) -> str:
        """One line of numbers."""
        if not self.cells:
            return f"An empty schedule of {_many(self.ranks, 'rank')}"
        of = "".join(f"{peak} " for peak in self.peak_in_flight).strip()
        return (
            f"{recognise(self)}: {_many(self.ranks, 'rank')}, {_many(self.microbatches, 'microbatch')}"
            f"{f', {self.chunks} chunks a rank' if self.chunks > 1 else ''}; {shown(self.makespan)} slots, "
            f"{self.bubble_overhead:.1%} over ideal, {self.idle_share:.1%} of the step idle; peak in flight {of}"
        )

    @property
    def text(self) -> str:
        """A row for each rank, a column for each slot; "." is idle, "~" the same action still. table_from() reads it."""
        fine = [Fraction(time) for cell in self.cells for time in (cell.time, cell.duration)]
        parts = lcm(*(time.denominator for time in fine)) if fine else 1
        columns = int(self.makespan * parts) if parts <= 12 else 10**9
        if columns > 2000:
            rows = [
                " ".join(f"{cell.action}@{shown(cell.time)}" for cell in self.cells if cell.rank == r) for r in range(self.ranks)
            ]
        else:
            grid = [["."] * columns for _ in range(self.ranks)]
            for cell in self.cells:
                first = int(cell.time * parts)
                for column in range(first, first + int(cell.duration * parts)):
                    grid[cell.rank][column] = str(cell.action) if column == first else "~"
            width = max((len(str(cell.action)) for cell in self.cells), default=1)
            rows = [" ".join(one.ljust(width) for one in row).rstrip() for row in grid]
        wide = len(str(self.ranks - 1))
        return "\n".join(f"rank {rank:{wide}} | {row}" for rank, row in enumerate(rows))


def recognise(schedule) -> str:
    """The name of a schedule, or of orders: "GPipe", "1F1B", "interleaved 1F1B", "ZB-H1", or "none that I know"."""
    return recognise_orders(schedule.orders if isinstance(schedule, Schedule) else orders_from(schedule))


# ---- small things ------------------------------------------------------------------------------------------------------------


def _over(a, b):
    """a / b, exact where both are whole numbers or fractions."""
    return a / b if isinstance(a, float) or isinstance(b, float) else Fraction(a) / Fraction(b)


def _peak(order: list[Action], last: str) -> int:
    most = now = 0
    for one in order:
        now += (one.kind == "F") - (one.kind == last)
        most = max(most, now)
    return most


def _many(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 'es' if thing.endswith('ch') else 's'}"
