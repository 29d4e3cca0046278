"""What the pipeline widget is set to, and what follows from it: schedule, recording, times of the table without a link, memory."""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import replace as changed
from functools import cached_property, lru_cache

from ..hardware import Device
from ..parallel.schedules import ScheduleError, gpipe, interleaved, one_f_one_b, timed, zero_bubble_h1
from ..pipelines import boundary_bytes, layers_per_stage, memory_of_ranks, record_pipeline, work_of_stages
from ..plots.wording import format_time, totals
from ..recording import Recording
from ..shapes import Shape

SCHEDULES = {"GPipe": gpipe, "1F1B": one_f_one_b, "interleaved 1F1B": interleaved, "ZB-H1": zero_bubble_h1}
INTERLEAVED, SPLIT = "interleaved 1F1B", "ZB-H1"


@dataclass(frozen=True)
class Setting:
    """`stages` ranks, one stage each; the interleaved schedule has `chunks` on each. `ratio`: backward / forward, in work.

    A microbatch has `sequences` of `sequence` tokens. `recompute` is for the memory: the ratio says what it costs in time.
    """

    shape: Shape
    device: Device
    sequence: int
    sequences: int
    schedule: str
    stages: int
    microbatches: int
    chunks: int
    ratio: float
    recompute: str = "selective"

    def orders(self, name: str | None = None) -> list:
        """For each rank what it runs. ScheduleError if this combination is impossible."""
        name = name or self.schedule
        if name != INTERLEAVED:
            return SCHEDULES[name](self.stages, self.microbatches)
        if self.chunks == 1:
            raise ScheduleError("Interleaved 1F1B needs 2 chunks a rank or more: with 1 it is 1F1B.")
        return interleaved(self.stages, self.microbatches, self.chunks)

    def pieces(self, name: str | None = None) -> int:
        """Into how many stages the model is cut: p, or p x v."""
        return self.stages * (self.chunks if (name or self.schedule) == INTERLEAVED else 1)

    def works(self, name: str | None = None) -> tuple[list, list, list]:
        """(forward, backward, weight) of each stage. Where backward is split, W is one forward, as its products are, or half of a
        shorter backward; B has the rest, so what is recomputed, too."""
        name = name or self.schedule
        forward, _, _ = work_of_stages(self.shape, self.pieces(name), self.sequence, self.sequences)
        weight = min(1.0, self.ratio / 2)
        backward = self.ratio - weight if name == SPLIT else self.ratio
        return forward, [one.scaled(backward) for one in forward], [one.scaled(weight) for one in forward]

    @cached_property
    def message_bytes(self) -> int:
        """Bytes of one message between stages."""
        return boundary_bytes(self.shape, self.sequence, self.sequences)

    @cached_property
    def layers(self) -> list[int]:
        """Layers of each stage."""
        return layers_per_stage(self.shape, self.pieces())

    @cached_property
    def recording(self) -> Recording:
        """One training step. The all-reduce of a tied embedding's gradient, and the optimizer, are left out."""
        return record_pipeline(self.orders(), *self.works(), message_bytes=self.message_bytes)

    def table(self, name: str | None = None):
        """The schedule with its times in seconds, messages taking none: predicted."""
        times = ([seconds(one, self.device) for one in kind] for kind in self.works(name))
        return timed(self.orders(name), *times)

    def alone(self, name: str | None = None):
        """A schedule without a link: (step, ideal, peak in flight in words, in more words), or why there is none."""
        return _alone(changed(self, schedule=name or self.schedule))

    @property
    def compared(self) -> dict:
        """The same of every schedule."""
        return {name: self.alone(name) for name in SCHEDULES}

    @cached_property
    def memory(self) -> list:
        """What each rank holds at its peak: predicted."""
        return memory_of_ranks(self.shape, self.orders(), self.sequence, self.sequences, recompute=self.recompute)

    def told(self) -> str:
        """The setting in words."""
        least, most = min(self.layers), max(self.layers)
        each = f"{most} layer{'s' if most > 1 else ''}" if least == most else f"{least} or {most} layers"
        cut = f"{self.stages} ranks, {each} each"
        if self.schedule == INTERLEAVED:
            cut = f"{self.stages} ranks with {self.chunks} chunks of {each} each"
        many = (
            f"{self.microbatches} microbatch{'es' if self.microbatches > 1 else ''} of {self.sequences} x {self.sequence:,} tokens"
        )
        return f"{self.schedule}: {self.shape.name or 'a model'} on {cut}; {many}; backward takes {self.ratio:g} times a forward"


@lru_cache(maxsize=256)
def _alone(setting: Setting):
    try:
        table = setting.table()
    except ValueError:  # interleaved: why it cannot be, in a few words
        if setting.chunks == 1:
            return "needs 2 chunks a rank or more"
        if setting.microbatches % setting.stages:
            return f"needs m to be a multiple of {setting.stages}"
        return "needs fewer stages"
    most = max(table.peak_in_flight)
    short, long = f"{most} in flight", f"{most} microbatch{'es'[: 2 * (most > 1)]}"
    if setting.schedule == INTERLEAVED:
        short, long = f"{most} chunks in flight", f"{most} (a microbatch counts in each of its {setting.chunks} chunks)"
    return float(table.makespan), float(sum(table.busy)) / setting.stages, short, long


def seconds(work, device: Device) -> float:
    """As replay prices it: for each operator the larger of FLOPs / (peak x efficiency) and bytes / bandwidth, plus the launch."""
    peak = device.flops * device.efficiency
    return sum(
        count * (max(operator.flops / peak, operator.nbytes / device.memory_bandwidth) + device.launch_overhead)
        for operator, count in work.operators
    )


def finding(timeline, setting: Setting) -> str:
    """The finding in words: the step, both definitions of its bubble, what the link adds, and the peak in flight."""
    computing = float(totals(timeline)[:, 0].mean())  # of the ranks: the ideal step
    step, (alone, _, _, many) = timeline.step_time, setting.alone()
    added = step - alone
    link = f"The link adds {format_time(added)} ({added / alone:.1%})" if added > 5e-4 * alone else "The link adds next to nothing"
    over, idle = step / computing - 1, 1 - computing / step
    return (
        f"Replayed: step {format_time(step)}; the bubble is {over:.1%} over ideal, {idle:.1%} of the step idle. {link} to the "
        f"{format_time(alone)} of the schedule alone. In flight on a rank: at most {many}."
    )


def slowest(timeline) -> str:
    """Which rank computes the longest, where that is not what all do."""
    computing = totals(timeline)[:, 0]
    share = computing.max() / computing.mean()
    return f"; rank {int(computing.argmax())} computes {share:.2f} times the mean" if share >= 1.01 else ""


def room(setting: Setting) -> str:
    """The memory in words: the fullest rank against the device."""
    fullest, has = max(setting.memory, key=lambda one: one.total), setting.device.memory
    fits = "fits into" if fullest.total <= has else "does not fit into"
    parts = f"{_gb(fullest.states)} of weights, gradients and optimizer, {_gb(fullest.activations)} of activations"
    needs = f"rank {fullest.rank} needs the most, {_gb(fullest.total)} ({parts})"
    return f"Predicted memory: {needs}; that {fits} the {_gb(has)} of a device."


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:,.3g} GB" if nbytes < 999.5e9 else f"{nbytes / 1e9:,.0f} GB"
