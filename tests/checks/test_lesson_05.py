"""Lesson 05's judges: their references against others, right answers of other kinds, and tables that are garbage."""

import functools
import itertools
import random
from pathlib import Path
from types import SimpleNamespace

import nbformat
import numpy as np
import pytest
import torch
import torch.distributed as dist

from lessons_lib.checks import NotYet, check, judge_memory, judge_pipelines, judge_schedules, judge_stages
from lessons_lib.checks.exercise import Wrong
from lessons_lib.checks.inside import Net
from lessons_lib.checks.nets_stages import Logged
from lessons_lib.checks.trial import SECONDS, draw, fresh
from lessons_lib.parallel import schedules

SOLUTIONS = Path(__file__).parents[2] / "solutions" / "05_pipeline_parallel.ipynb"

# ---- references ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", range(1, 8))
def test_1f1b_of_the_judge_is_that_of_the_library(p):
    for m in range(1, 12):
        assert [judge_schedules.one_f_one_b_of(rank, p, m) for rank in range(p)] == schedules.one_f_one_b(p, m)


def test_microbatches_needed_against_schedules_that_are_timed():
    for p in (1, 2, 3, 5, 8):
        for percent in (5, 10, 25, 50, 80):
            m = judge_schedules._needed(p, percent / 100)
            assert schedules.timed(schedules.gpipe(p, m)).idle_share <= percent / 100
            assert m == 1 or schedules.timed(schedules.gpipe(p, m - 1)).idle_share > percent / 100


def test_the_best_cut_against_every_cut():
    for _ in range(100):
        layers = random.randint(1, 9)
        p, costs = random.randint(1, layers), [random.randint(1, 30) for _ in range(layers)]
        cuts = [(0, *cut, layers) for cut in itertools.combinations(range(1, layers), p - 1)]
        best = min(max(sum(costs[a:b]) for a, b in itertools.pairwise(cut)) for cut in cuts)
        assert judge_stages.least_slowest(costs, p) == best


def test_a_table_in_which_nobody_waits_for_nothing_takes_twelve_slots():
    """So the check can always name a slot: it plays every such table of 3 ranks and 4 microbatches, from what is through."""
    p, m = judge_schedules._RANKS, judge_schedules._MICROBATCHES

    def ready(forwards, backwards, rank):
        found = [("F", i) for i in range(m) if i not in forwards[rank] and (rank == 0 or i in forwards[rank - 1])]
        own = forwards[rank] - backwards[rank]
        return found + [("B", i) for i in own if rank == p - 1 or i in backwards[rank + 1]]

    @functools.cache
    def lengths(forwards, backwards):
        if all(len(one) == m for one in backwards):
            return frozenset([0])
        found = set()
        for choice in itertools.product(*[ready(forwards, backwards, rank) or [None] for rank in range(p)]):
            done = [
                tuple(one | {pick[1]} if pick and pick[0] == kind else one for one, pick in zip(before, choice))
                for kind, before in (("F", forwards), ("B", backwards))
            ]
            found |= {1 + one for one in lengths(*done)}
        return frozenset(found)

    assert lengths((frozenset(),) * p, (frozenset(),) * p) == {12}


def test_one_process_of_the_judge_against_a_whole_batch():
    nets = [Net(Logged, fresh(), (4,), largest=2) for _ in range(3)]
    sizes = (3, 2, 1)
    inputs, targets = ([draw(n, 4, largest=3) for n in sizes] for _ in range(2))
    losses, parts, _ = judge_pipelines._one_process(nets, inputs, targets)
    stages = [net.make() for net in nets]
    y = torch.nn.Sequential(*stages)(torch.cat([one.make() for one in inputs]))
    loss = (y - torch.cat([one.make() for one in targets])).square().mean() / 2
    loss.backward()
    assert loss.item() == pytest.approx(sum(n * one for n, one in zip(sizes, losses)) / 6, rel=1e-5)
    for stage, part in zip(stages, parts):
        for name, gradients in part.items():
            right = stage.get_parameter(name).grad.numpy()
            np.testing.assert_allclose(sum(n * g for n, g in zip(sizes, gradients)) / 6, right, rtol=1e-4, atol=1e-3)


def test_a_stage_notes_what_ran():
    stage = Net(Logged, fresh(), (2,)).make()
    first, second = stage(torch.ones(1, 2)), stage(torch.ones(1, 2))
    second.sum().backward()
    first.sum().backward()
    assert stage.log[:5].tolist() == [1, 3, 4, 2, 0]


@pytest.mark.parametrize("orders", [
    schedules.gpipe(3, 2), schedules.one_f_one_b(2, 5), schedules.one_f_one_b(4, 4), schedules.zero_bubble_h1(3, 4),
    schedules.greedy(3, 5, 2, True), schedules.gpipe(1, 2),
])  # fmt: skip
def test_a_table_that_ran_on_real_ranks_takes_in_the_replay_what_it_takes_in_the_table(orders):
    split = any(one.kind == "W" for one in orders[0])
    schedule = schedules.timed(orders, **judge_memory.times(split))
    assert judge_memory._ran(schedule) == pytest.approx(schedule.makespan, rel=1e-9)


# ---- other right answers -----------------------------------------------------------------------------------------------


def passes(answer, exercise, capsys) -> str:
    check(answer, exercise)
    out = capsys.readouterr().out
    assert out.startswith(f"Passed: {exercise}.")
    return out


GPIPE = """
rank 0 | F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3
rank 1 | .  F0 F1 F2 F3 .  .  B0 B1 B2 B3 .
rank 2 | .  .  F0 F1 F2 F3 B0 B1 B2 B3 .  .
"""
OWN = ["F0 F1 F2 F3 .  .  . B0 . B1 B2 B3", ". F0 F1 F2 F3 . B0 . B1 B2 B3 .", ". . F0 F1 F2 B0 F3 B1 B2 B3 . ."]


def test_the_schedule_is_named_with_its_own_numbers(capsys):
    assert "Your schedule is GPipe: 12 slots (par 12), 50.0% over ideal, 33.3% of the step idle; at most 4 4 4" in passes(
        lambda: GPIPE, "three_by_four", capsys
    )
    assert "Your schedule is one of your own: 12 slots" in passes(lambda: OWN, "three_by_four", capsys)
    words = [["" if word == "." else word for word in row.split()] for row in OWN]  # lists of words, idle written in two ways
    assert "one of your own: 12 slots" in passes(lambda: [words[0], tuple(OWN[1].split()), words[2]], "three_by_four", capsys)


def test_orders_may_be_lists_and_tuples(capsys):
    def order(rank, p, m):
        return [(one.kind, one.microbatch) for one in schedules.one_f_one_b(p, m)[rank]]

    assert "22 slots, as GPipe does: 27.3% of the step idle. At most 4 3 2 1 microbatches" in passes(order, "order_of_rank", capsys)


def test_orders_may_have_dots_where_a_rank_waits(capsys):
    def order(rank, p, m):
        words = [str(one) for one in schedules.one_f_one_b(p, m)[rank]]
        return ". " * rank + " . ".join(words) if rank % 2 else ["."] * rank + words + [".", "-"]

    assert "22 slots, as GPipe does" in passes(order, "order_of_rank", capsys)


@pytest.mark.parametrize("kind", [np.array, torch.tensor, tuple])
def test_numbers_of_layers_may_be_an_array(kind, capsys):
    space = from_solutions("balance")
    assert "14 layers, 12 blocks of cost 4" in passes(lambda costs, p: kind(space["balance"](costs, p)), "balance", capsys)


def test_tied_gradients_may_be_swapped_by_hand(capsys):
    def swap(stage):
        rank, n = dist.get_rank(), dist.get_world_size()
        if stage.table is not None and n > 1:
            theirs = torch.empty_like(stage.table)
            sending = dist.isend(stage.table.grad.clone(), n - 1 - rank)
            dist.recv(theirs, n - 1 - rank)
            sending.wait()
            stage.table.grad += theirs

    passes(swap, "sum_tied", capsys)


def from_solutions(name: str) -> dict:
    """What the cell of a solution defines."""
    space = {}
    for cell in nbformat.reads(SOLUTIONS.read_text(encoding="utf-8"), as_version=4).cells:
        if f"def {name}(" in cell.source:
            exec(cell.source, space)
    return space


def test_par_passes_and_the_library_alone_falls_behind_it(capsys):
    def answer(p, m, in_flight, split):
        schedule = judge_memory.known(p, m, in_flight, split)
        return [" ".join(map(str, order)) for order in schedule.orders]

    assert "All 17 sizes: the 14 that are always asked take 294 slots; par 294: reached; it can be beaten" in passes(
        answer, "within_memory", capsys
    )
    library = [schedules.par(p, m, k, split, **judge_memory.times(split)).makespan for p, m, k, split in judge_memory.CASES]
    assert sum(library) > 294


def test_par_can_be_beaten():
    orders = [
        "F0 F1 F2 B0 W0 F3 B1 W1 F4 B2 W2 F5 B3 W3 F6 B4 W4 F7 B5 W5 B6 W6 B7 W7",
        "F0 F1 F2 B0 W0 B1 W1 F3 B2 W2 F4 B3 F5 W3 B4 F6 B5 W4 F7 W5 B6 W6 B7 W7",
        "F0 F1 F2 B0 W0 B1 W1 B2 F3 W2 B3 F4 W3 F5 B4 W4 B5 F6 W5 F7 B6 W6 B7 W7",
        "F0 B0 F1 B1 W0 F2 B2 W1 W2 F3 B3 W3 F4 B4 F5 B5 W4 W5 F6 B6 W6 F7 B7 W7",
    ]
    schedule = judge_memory._expect_schedule(orders, 4, 8, 3, True)
    assert (4, 8, 3, True) in judge_memory.CASES and schedule.makespan == judge_memory.known(4, 8, 3, True).makespan - 1


def test_the_solution_never_falls_behind_par():
    space = from_solutions("within_memory")
    for p, m, split in itertools.product(range(2, 6), range(2, 9), (False, True)):  # the sizes that the check draws
        for limit in range(1, m + 1):
            schedule = judge_memory._expect_schedule(space["within_memory"](p, m, limit, split), p, m, limit, split)
            assert schedule.makespan <= judge_memory.known(p, m, limit, split).makespan


def test_a_search_that_takes_too_long_is_told_so(short_limit):
    def search(p, m, in_flight, split):
        while True:
            pass

    with pytest.raises(NotYet, match="there are 17 sizes, and a search over all orders is too slow for them. Let time run slot"):
        check(search, "within_memory")


# ---- garbage -------------------------------------------------------------------------------------------------------------


class Hostile(tuple):
    def __repr__(self):
        raise RuntimeError("no")


GARBAGE = [
    None, 7, 2.5, True, "", "F0", [], (), {}, [None] * 3, [[]] * 3, ["", "", ""], ["."] * 3, ["F0 F1"] * 3, [[None]] * 3,
    [["F0"], 3, "B0"], [["F0", ""]] * 3, ["f0"] * 3, ["F-1"] * 3, ["F1.5"] * 3, ["F99999"] * 3, ["F9999999"] * 3, ["F0.9"] * 3,
    ["X" * 10_000] * 3, ["F0 " * 100_000] * 3, ["F0 B0"] * 10_000, [[("F", -1)]] * 3, [[("F", 10**30)]] * 3, [[("F", "0")]] * 3,
    [[("G", 0)]] * 3, [[("F",)]] * 3, [[()]] * 3, [[("F", True)]] * 3, np.zeros(3), torch.zeros(3), [float("nan")] * 3, b"F0",
    {"F0"}, [{"a": 1}] * 3, range(3), float("inf"), 10**400,
]  # fmt: skip


JUDGES = {
    "three_by_four": judge_schedules.judge_three_by_four,
    "order_of_rank": judge_schedules.judge_order_of_rank,
    "within_memory": judge_memory.judge_within_memory,
    "balance": judge_stages.judge_balance,
    "microbatches_needed": judge_schedules.judge_microbatches_needed,
}


@pytest.mark.parametrize("exercise", JUDGES)
@pytest.mark.parametrize("value", [*GARBAGE, [Hostile((1, 2))] * 3], ids=lambda value: type(value).__name__)
def test_garbage_gets_a_sentence(exercise, value):
    """As if a rank had sent it back: what cannot be sent is the trial's to say."""
    with pytest.raises(Wrong) as caught:
        JUDGES[exercise](SimpleNamespace(values=lambda inputs: [value] * len(inputs)))
    said = str(caught.value)
    assert 20 < len(said) < 1500


@pytest.mark.parametrize("value", [None, ["F0 " * 100_000] * 3, [[("F", 10**30)]] * 3, [Hostile((1, 2))] * 3, 10**400])
def test_garbage_out_of_a_rank_gets_a_sentence(value):
    with pytest.raises(NotYet) as caught:
        check(lambda p, m, in_flight, split: value, "within_memory")
    assert "check itself failed" not in str(caught.value)


# ---- texts ---------------------------------------------------------------------------------------------------------------


def test_numbers_in_the_texts_are_those_of_the_checks():
    text = "\n".join(cell.source for cell in nbformat.reads(SOLUTIONS.read_text(encoding="utf-8"), as_version=4).cells)
    ranks, microbatches = judge_schedules._RANKS, judge_schedules._MICROBATCHES
    assert f"{ranks} ranks, {microbatches} microbatches, each F and each B takes one slot" in text
    assert schedules.timed(schedules.gpipe(ranks, microbatches)).makespan == 12 and "no more than **twelve slots**" in text
    assert (
        judge_memory.times(False) == {"forward": 1, "backward": 2, "weight": 1}
        and "F takes 1 slot, B as the whole backward 2." in text
    )
    asked = []
    with pytest.raises(Wrong):
        judge_memory.judge_within_memory(SimpleNamespace(values=lambda inputs: asked.extend(inputs) or [None] * len(inputs)))
    words = " ".join(text.split())
    assert f"The check asks for {len(asked)} sizes; all of them together may take about {SECONDS:g} seconds" in words
