"""Schedules as data: the textbook's numbers, the published bubble rates, and what cannot run, each with its reason."""

import csv
import random
import re
from fractions import Fraction
from pathlib import Path

import pytest

from lessons_lib.parallel.schedules import (
    Action,
    Cell,
    Schedule,
    ScheduleError,
    action,
    check_blocking_sends,
    check_orders,
    check_schedule,
    gpipe,
    greedy,
    interleaved,
    one_f_one_b,
    orders_from,
    par,
    recognise,
    table_from,
    timed,
    zero_bubble_h1,
)  # fmt: skip

SIZES = [(1, 1), (1, 4), (2, 1), (2, 2), (2, 7), (3, 2), (3, 3), (3, 5), (4, 3), (4, 8), (5, 13), (8, 32)]


def known(p, m):
    """Every generator at one size, by name."""
    found = {"GPipe": gpipe(p, m), "1F1B": one_f_one_b(p, m), "ZB-H1": zero_bubble_h1(p, m)}
    return found | {f"interleaved {v}": interleaved(p, m, v) for v in (2, 3) if m % p == 0}


# ---- textbook --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [gpipe, one_f_one_b])
def test_slots_of_the_textbook(make):
    assert timed(make(8, 32)).makespan == 78
    assert timed(make(4, 8)).makespan == 22
    assert timed(make(4, 8), forward=1, backward=2).makespan == 33


def test_peaks_of_the_textbook():
    assert timed(one_f_one_b(4, 8)).peak_in_flight == [4, 3, 2, 1]
    assert timed(gpipe(4, 8)).peak_in_flight == [8, 8, 8, 8]


def test_both_definitions_of_the_bubble():
    schedule = timed(one_f_one_b(4, 8))
    assert schedule.bubble_overhead == 0.375 and round(schedule.idle_share, 3) == 0.273
    assert "37.5% over ideal, 27.3% of the step idle; peak in flight 4 3 2 1" in repr(schedule)


@pytest.mark.parametrize("p,m", SIZES)
@pytest.mark.parametrize("forward,backward", [(1, 1), (1, 2), (Fraction(2, 3), Fraction(7, 5)), (0.5, 0.25)])
def test_gpipe_and_1f1b_against_the_closed_forms(p, m, forward, backward):
    for make in (gpipe, one_f_one_b):
        schedule = timed(make(p, m), forward, backward)
        assert schedule.makespan == (m + p - 1) * (forward + backward)
        assert schedule.idle == [(p - 1) * (forward + backward)] * p
        assert schedule.bubble_overhead == pytest.approx((p - 1) / m, rel=1e-12)
        assert schedule.idle_share == pytest.approx((p - 1) / (m + p - 1), rel=1e-12)
        assert schedule.messages == 2 * m * (p - 1)
    assert timed(gpipe(p, m)).peak_in_flight == [m] * p
    assert timed(one_f_one_b(p, m)).peak_in_flight == [min(m, p - rank) for rank in range(p)]


@pytest.mark.parametrize("p,m,v", [(2, 2, 2), (2, 6, 3), (3, 3, 2), (4, 8, 2), (4, 16, 3), (8, 32, 4), (1, 5, 3)])
@pytest.mark.parametrize("backward", [1, 2])
def test_interleaved_against_the_closed_forms(p, m, v, backward):
    schedule = timed(interleaved(p, m, v), forward=Fraction(1, v), backward=Fraction(backward, v))
    assert schedule.makespan == (m + Fraction(p - 1, v)) * (1 + backward)
    assert schedule.bubble_overhead == pytest.approx((p - 1) / (v * m), rel=1e-12)
    assert schedule.idle_share == pytest.approx((p - 1) / (v * m + p - 1), rel=1e-12)
    assert schedule.messages == (2 * m * (p * v - 1) if p > 1 else 0)
    if m > p > 1:  # chunks of 1/v of the layers: 1 + (p-1)/(pv) times what 1F1B holds on its first rank
        assert Fraction(schedule.peak_in_flight[0], v) / p == 1 + Fraction(p - 1, p * v)


@pytest.mark.parametrize("p,m", [(2, 4), (3, 6), (4, 8), (8, 24), (4, 4), (5, 11)])
@pytest.mark.parametrize("f,b,w", [(1, 1, 1), (3, 3, 2), (10, 11, 5), (2, 2, 1)])
def test_zero_bubble_against_the_paper(p, m, f, b, w):
    """arXiv:2401.10241, section 2.3 and table 1: ZB-H1 idles (p-1)(F+B-W), and keeps no more than 1F1B's first rank."""
    split, joined = timed(zero_bubble_h1(p, m), f, b, w), timed(one_f_one_b(p, m), f, b + w)
    assert joined.idle == [(p - 1) * (f + b + w)] * p
    assert split.idle == [(p - 1) * (f + b - w)] * p
    assert split.peak_in_flight == joined.peak_in_flight
    assert max(split.peak_kept) == p == max(joined.peak_kept)


def test_uneven_stages_go_at_the_pace_of_the_slowest():
    last_is_slow = timed(one_f_one_b(4, 32), forward=[1, 1, 1, 2], backward=[1, 1, 1, 2])
    assert last_is_slow.makespan == 32 * 4 + 3 * 2
    assert last_is_slow.busy == [64, 64, 64, 128] and last_is_slow.ideal == 80


@pytest.mark.parametrize("hop", [0, 1, Fraction(1, 4)])
def test_a_hop_delays_every_message(hop):
    assert timed(gpipe(3, 5), 1, 2, hop=hop).makespan == (5 + 2) * 3 + 4 * hop  # filled once, drained once
    assert timed(one_f_one_b(3, 1), 1, 2, hop=hop).makespan == 9 + 4 * hop
    assert timed(interleaved(1, 4, 2), hop=hop).makespan == 16  # between chunks of one rank nothing is sent


# ---- published -------------------------------------------------------------------------------------------------------------

TABLE = list(csv.DictReader((Path(__file__).parents[1] / "data" / "zerobubble_table5.csv").open(encoding="utf-8")))


def published(row):
    """(schedule with the paper's times, published rate, rate here): (step - m (F + B + W)) / step, step = the makespan.

    Source: arXiv:2401.10241, section 5.3: the cost is "the largest execution time of all stages", with T_comm for every message.
    """
    f, b, w, hop = (float(x) for x in re.findall(r"=([\d.]+)", row["notes"].partition(";")[0]))
    p, m, v = int(row["pp"]), int(row["n_microbatches"]), int(row["interleave_v"])
    if row["schedule"] == "ZB-H1":
        schedule = timed(zero_bubble_h1(p, m), f, b, w, hop)
    else:
        orders = interleaved(p, m, v) if row["schedule"] == "1F1B-I" else one_f_one_b(p, m)
        schedule = timed(orders, f / v, (b + w) / v, hop=hop)
    ideal = m * (f + b + w)
    return schedule, float(row["value"]), (schedule.makespan - ideal) / schedule.makespan


@pytest.mark.parametrize("row", [row for row in TABLE if row["schedule"] in ("1F1B", "ZB-H1")], ids=lambda row: row["locator"])
def test_published_bubble_rates_to_four_decimals(row):
    _, expected, found = published(row)
    assert f"{found:.4f}" == f"{expected:.4f}"


@pytest.mark.parametrize("row", [row for row in TABLE if row["schedule"] == "1F1B-I"], ids=lambda row: row["locator"])
def test_published_bubble_rates_of_interleaved_1f1b_but_for_one_pass_of_messages(row):
    """The paper does not print how its simulation sends between chunks. It has p messages fewer in the longest chain than here."""
    schedule, expected, found = published(row)
    hop, p = float(re.search(r"Tcomm=([\d.]+)", row["notes"])[1]), int(row["pp"])
    without = schedule.makespan - p * hop
    ideal = schedule.makespan * (1 - found)
    print(f"{row['locator']}: published {expected:.4f}, here {found:.4f}, with p messages fewer {(without - ideal) / without:.4f}")
    assert 0 < found - expected < 0.004
    assert f"{(without - ideal) / without:.4f}" == f"{expected:.4f}"


def test_the_table_holds_all_published_rows():
    assert [sum(row["schedule"] == name for row in TABLE) for name in ("1F1B", "1F1B-I", "ZB-H1")] == [6, 6, 6]


# ---- any order that can run ------------------------------------------------------------------------------------------------


def fixed_point(orders, times, hop):
    """Start times by another way: raise every start until nothing changes (longest path)."""
    p = len(orders)
    v = max(one.chunk for one in orders[0]) + 1
    stage = {(rank, one): one.chunk * p + rank for rank, order in enumerate(orders) for one in order}
    where = {(one.kind, one.microbatch, stage[rank, one]): (rank, one) for rank, one in stage}
    start = dict.fromkeys(stage, 0)
    for _ in range(10_000):
        before = dict(start)
        for rank, order in enumerate(orders):
            for n, one in enumerate(order):
                s, bounds = stage[rank, one], [0]
                needed = {"F": [("F", s - 1)], "B": [("F", s), ("B", s + 1)], "W": [("B", s)]}[one.kind]
                for kind, other in needed:
                    if 0 <= other < p * v:
                        key = where[kind, one.microbatch, other]
                        bounds.append(start[key] + times[kind] + (hop if key[0] != rank else 0))
                if n:
                    bounds.append(start[rank, order[n - 1]] + times[order[n - 1].kind])
                start[rank, one] = max(bounds)
        if start == before:
            return start
    raise AssertionError("these orders never settle")


@pytest.mark.parametrize("seed", range(6))
def test_times_are_the_earliest_ones(seed):
    draw = random.Random(seed)
    p, m = draw.choice([(2, 4), (3, 6), (4, 4)])
    times = {"F": draw.randint(1, 3), "B": draw.randint(1, 4), "W": draw.randint(1, 2)}
    hop = draw.choice([0, 1, Fraction(1, 2)])
    for orders in known(p, m).values():
        schedule = timed(orders, times["F"], times["B"], times["W"], hop)
        assert {(cell.rank, cell.action): cell.time for cell in schedule.cells} == fixed_point(orders, times, hop)
        assert check_schedule(schedule, p, m) is schedule


@pytest.mark.parametrize("p,m", SIZES)
def test_each_is_recognised_and_comes_back_from_its_own_text(p, m):
    for name, orders in known(p, m).items():
        schedule = timed(orders)
        assert table_from(schedule.text) == schedule
        assert table_from([tuple(cell) for cell in reversed(schedule.cells)]) == schedule
        seen = recognise(schedule)
        if m == 1 and name in ("GPipe", "1F1B"):
            assert seen == "one microbatch at a time"
        elif p > 1 or name == "1F1B":
            assert seen == name.rstrip(" 23").replace("interleaved", "interleaved 1F1B")


def test_gpipe_is_known_with_backwards_in_either_order_and_others_are_not_known():
    assert recognise(["F0 F1 F2 B2 B1 B0"] * 3) == "GPipe"
    assert recognise(["F0 F1 B1 B0", "F0 F1 B0 B1"]) == "none that I know"
    assert recognise(["F0 F1 F2 B0 B1 B2", "F0 F1 B0 F2 B1 B2"]) == "none that I know"
    assert recognise(table_from([". .", ". ."])) == "none that I know"


def test_actions_read_and_write_themselves():
    for text, made in (("F3", Action("F", 3)), ("B0", Action("B", 0)), ("F2.1", Action("F", 2, 1)), ("W12.3", Action("W", 12, 3))):
        assert action(text) == made and str(made) == text
    assert action("F3.0") == Action("F", 3)
    assert orders_from(["F0 B0", [("F", 0), Action("B", 0)]]) == [[Action("F", 0), Action("B", 0)]] * 2


# ---- what cannot run -------------------------------------------------------------------------------------------------------

GOOD = ["F0 F1 .  .  B0 B1", ".  F0 F1 B0 B1 ."]


def changed(row, slot, word):
    rows = [line.split() for line in GOOD]
    rows[row][slot] = word
    return table_from([" ".join(words) for words in rows])


@pytest.mark.parametrize(
    "schedule,words",
    [
        (changed(0, 1, "."), "Rank 0 never runs F1: every rank runs F and B of each of the 2 microbatches"),
        (changed(0, 2, "F0"), "Rank 0 runs F0 2 times; every action is run once"),
        (changed(1, 0, "F2"), "Rank 0 never runs F2, B2"),
        (changed(1, 0, "F1.1"), "Rank 0 never runs F0.1, B0.1, F1.1, B1.1: .* in each of its 2 chunks"),
        (changed(1, 0, "W1"), "Rank 0 never runs W0, W1: every rank runs F and B and W"),
        (table_from(["F0 F1 . B0 B1", "F0 F1 B0 B1"]),
         "rank 1 runs F0 at slot 0, but rank 0 finishes F0 at slot 1: the forward"),
        (table_from(["F0 . F1 B0 B1", ". F0 F1 B0 B1"]), "rank 1 runs F1 at slot 2, but rank 0 finishes F1 at slot 3"),
        (table_from(["F0 F1 . B0 B1", ". F0 F1 B0 B1"]),
         "rank 0 runs B0 at slot 3, but rank 1 finishes B0 at slot 4: the backward of a"),
        (table_from(["F0 F1 . . B0 B1", ". B0 F0 F1 B1"]),
         "rank 1 runs B0 at slot 1, but it finishes F0 at slot 3: a backward needs its own"),
        (table_from(["F0 W0 B0"]), "rank 0 runs W0 at slot 1, but it finishes B0 at slot 3: the gradient of the weights"),
        (table_from(["F0 B0 B1 F1"]), "rank 0 runs B1 at slot 2, but it finishes F1 at slot 4"),
        (table_from([(0, 0, "F", 0), (0, 0.5, "F", 1), (0, 3, "B", 0), (0, 4, "B", 1)]),
         "rank 0 starts F1 at slot 0.5, but it runs F0 until slot 1: a rank does one thing at a time"),
        (table_from(["F0 B0 B1 F1"], backward=2), "rank 0 starts B1 at slot 2, but it runs B0 until slot 3"),
        (table_from(GOOD, hop=1), "rank 1 runs F0 at slot 1, but rank 0 finishes F0 at slot 1, and its message takes 1 more"),
    ],
)  # fmt: skip
def test_an_impossible_schedule_is_refused_with_the_reason(schedule, words):
    with pytest.raises(ScheduleError, match=words):
        check_schedule(schedule)


def test_slots_are_counted_as_in_the_reason():
    late = table_from(["F0 F1 F2 . . F3 . B0 B1 B2 B3", ". F0 F1 F2 . F3 B0 B1 B2 B3 ."])
    with pytest.raises(ScheduleError, match="rank 1 runs F3 at slot 5, but rank 0 finishes F3 at slot 6"):
        check_schedule(late)


def test_sizes_that_are_said_are_held_against_the_table():
    good = table_from(GOOD)
    assert check_schedule(good, ranks=2, microbatches=2, chunks=1, split=False) is good
    for sizes, words in (
        ({"ranks": 3}, "rows for 2 ranks, but there are 3"),
        ({"microbatches": 3}, "Rank 0 never runs F2, B2"),
        ({"microbatches": 1}, "Rank 0 runs F1, but there is 1 microbatch: the last is number 0"),
        ({"chunks": 2}, "Rank 0 never runs F0.1"),
        ({"split": True}, "Rank 0 never runs W0, W1"),
        ({"microbatches": 0}, "The number of microbatches is 0, but must be a whole number from 1"),
        ({"chunks": True}, "The number of chunks must be a whole number"),
    ):
        with pytest.raises(ScheduleError, match=words):
            check_schedule(good, **sizes)
    with pytest.raises(ScheduleError, match="does not split backward"):
        check_schedule(timed(zero_bubble_h1(2, 2)), split=False)
    with pytest.raises(ScheduleError, match="a rank has 1 chunk: the last is number 0"):
        check_schedule(timed(interleaved(2, 2, 2)), chunks=1)


def can_run(rows):
    """The rules once more, for actions of one slot: rows[rank][slot]."""
    at = {}
    for rank, row in enumerate(rows):
        for slot, word in enumerate(row):
            if word != "." and at.setdefault((rank, word), slot) != slot:
                return False
    last, m = len(rows) - 1, max((int(word[1:]) for _, word in at), default=-1) + 1
    for rank in range(len(rows)):
        for i in range(m):
            if not {(rank, f"F{i}"), (rank, f"B{i}")} <= at.keys() or at[rank, f"B{i}"] < at[rank, f"F{i}"]:
                return False
            if rank and at[rank, f"F{i}"] <= at.get((rank - 1, f"F{i}"), 10**6):
                return False
            if rank < last and at[rank, f"B{i}"] <= at.get((rank + 1, f"B{i}"), 10**6):
                return False
    return m > 0


def test_random_tables_are_refused_exactly_where_the_rules_say():
    draw, found = random.Random(5), []
    for _ in range(3000):
        p, m = draw.choice([1, 2, 3]), draw.choice([1, 2, 3])
        schedule = timed(draw.choice([gpipe, one_f_one_b, greedy])(p, m))
        slots = schedule.makespan + draw.choice([0, 0, 1, 2])
        rows = [["."] * slots for _ in range(p)]
        for cell in schedule.cells:
            rows[cell.rank][cell.time] = str(cell.action)
        for _ in range(draw.choice([0, 1, 1, 2])):
            row, a, b = draw.choice(rows), draw.randrange(slots), draw.randrange(slots)
            row[a], row[b] = row[b], row[a]
        if draw.random() < 0.1:
            draw.choice(rows)[draw.randrange(slots)] = draw.choice([".", "F0", "B1", "F5", "F3"])
        try:
            check_schedule(table_from([" ".join(row) for row in rows]))
            found.append(True)
        except ScheduleError:
            found.append(False)
        assert found[-1] == can_run(rows), rows
    assert 1000 < sum(found) < 2000


def test_every_too_early_start_in_a_real_schedule_is_found():
    """Move any one action of an exact schedule a slot earlier: it always breaks something, since all start as early as they can."""
    for orders in known(3, 6).values():
        schedule = timed(orders)
        for n, cell in enumerate(schedule.cells):
            if cell.time:
                moved = (*schedule.cells[:n], cell._replace(time=cell.time - 1), *schedule.cells[n + 1 :])
                with pytest.raises(ScheduleError, match="slot"):
                    check_schedule(Schedule(3, tuple(sorted(moved, key=lambda one: one[:2]))))


@pytest.mark.parametrize(
    "orders,words",
    [
        (["B0 F0", "F0 B0"], "rank 0 cannot run B0 before F0, which comes later in its own order"),
        (["F0 B0 F1 B1", "F0 F1 B1 B0"], "rank 0 cannot run B0 before B0 of rank 1, and rank 1 has B0 only after F1; rank 1 cannot "
         "run F1 before F1 of rank 0, and rank 0 has F1 only after B0"),
        (["F0 W0 B0"], "rank 0 cannot run W0 before B0, which comes later"),
        (["F0.1 F0 B0.1 B0", "F0 F0.1 B0.1 B0"], "rank 0 cannot run F0.1 before F0 of rank 1"),
    ],
)  # fmt: skip
def test_orders_that_wait_in_a_circle_are_explained(orders, words):
    with pytest.raises(ScheduleError, match=f"wait for each other for ever: .*{words}"):
        timed(orders)


def test_blocking_sends_do_for_gpipe_and_deadlock_1f1b():
    assert check_blocking_sends(gpipe(4, 8)) == gpipe(4, 8)
    assert check_blocking_sends(one_f_one_b(4, 1)) == one_f_one_b(4, 1)
    with pytest.raises(ScheduleError, match="rank 2 waits to send F1 to rank 3; rank 3 waits to send B0 to rank 2. .*dist.isend"):
        check_blocking_sends(one_f_one_b(4, 8))
    for orders in (interleaved(4, 8, 2), zero_bubble_h1(4, 8)):
        with pytest.raises(ScheduleError, match="blocking sends"):
            check_blocking_sends(orders)


# ---- par -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p,m", [(2, 5), (4, 8), (3, 3)])
@pytest.mark.parametrize("split", [False, True])
def test_par_keeps_its_limit_and_never_gets_worse_with_more_room(p, m, split):
    spans = []
    for limit in range(1, m + 1):
        schedule = check_schedule(par(p, m, limit, split), p, m, split=split)
        assert max(schedule.peak_kept) <= limit
        spans.append(schedule.makespan)
    assert spans == sorted(spans, reverse=True)
    assert spans[0] == m * (2 * p + split)  # one microbatch at a time
    assert spans[-1] == (3 * m + p - 1 if split else (m + p - 1) * 2)
    assert par(p, m, split=split).makespan == spans[-1]


def test_greedy_with_room_for_p_is_as_good_as_1f1b():
    for p, m in ((2, 4), (4, 8), (3, 9)):
        assert timed(greedy(p, m, p)).makespan == timed(one_f_one_b(p, m)).makespan


# ---- bad input -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [0, -1, True, 1.5, None, "4", float("nan"), 10**12, 10**40])
@pytest.mark.parametrize("make", [gpipe, one_f_one_b, zero_bubble_h1, greedy, par, lambda p, m: interleaved(p, m, 2)])
def test_sizes_that_are_none_are_refused(make, bad):
    for sizes in ((bad, 4), (4, bad)):
        with pytest.raises(ScheduleError, match=r"The number of (ranks p|microbatches m) (is|must be)"):
            make(*sizes)


@pytest.mark.parametrize("bad", [0, -1, True, None, "1", float("nan"), float("inf")])
def test_times_that_are_none_are_refused(bad):
    for name in ("forward", "backward", "weight"):
        with pytest.raises(ScheduleError, match=rf"{name} \(the time of an action\) (is|must be)"):
            timed(gpipe(2, 2), **{name: bad})
        with pytest.raises(ScheduleError, match=rf"{name} \(the time of an action\) of stage 1"):
            timed(gpipe(2, 2), **{name: [1, bad]})
    if bad != 0 or isinstance(bad, bool):
        with pytest.raises(ScheduleError, match="hop"):
            timed(gpipe(2, 2), hop=bad)


def test_other_bad_input_is_refused_by_a_sentence():
    for call, words in (
        (lambda: timed(None), "Orders are a list with one row for each rank"),
        (lambda: timed([]), "Orders are a list"),
        (lambda: timed([[], []]), "The schedule is empty"),
        (lambda: timed([None]), "The order of rank 0 must be text"),
        (lambda: timed(["F0 X1"]), "In the order of rank 0: 'X1' is not an action"),
        (lambda: timed(["F0 B"]), "'B' is not an action: write F, B or W"),
        (lambda: timed([[("F", -1)]]), "The microbatch of F is -1"),
        (lambda: timed([[("F", True)]]), "The microbatch of F must be a whole number"),
        (lambda: timed([[("G", 1)]]), "The kind of an action is 'G'"),
        (lambda: timed([["F0", 7]]), "7 is not an action"),
        (lambda: timed(gpipe(2, 2), forward=[1]), "forward has 1 times, but there are 2 stages"),
        (lambda: interleaved(4, 6, 2), "in groups of p = 4, but m is 6: choose a multiple of 4"),
        (lambda: interleaved(4, 8, 0), "The number of chunks v is 0"),
        (lambda: gpipe(1024, 65536), "too many actions"),
        (lambda: greedy(100, 100), "take too long here"),
        (lambda: par(4, 8, forward=[1, 2, 3, 4]), r"forward must be a finite number above 0, not \[1, 2"),
        (lambda: greedy(4, 8, hop=-1), "hop .* is -1"),
        (lambda: par(4, 8, 0), r"in_flight \(microbatches kept on a rank\) is 0"),
        (lambda: table_from(None), "A table is a list"),
        (lambda: table_from([]), "A table is a list"),
        (lambda: table_from(["F0 f1"]), "At rank 0, slot 1: 'f1' is not an action"),
        (lambda: table_from([(0, 1)]), "A row of the table is"),
        (lambda: table_from([(-1, 0, "F", 0)]), "The rank of a row is -1"),
        (lambda: table_from([(0, -1, "F", 0)]), "The time of a row of rank 0 is -1"),
        (lambda: table_from([(0, float("nan"), "F", 0)]), "The time of a row of rank 0 is nan"),
        (lambda: table_from([Cell(0, 0, "F", 0, 0, -2)]), "The duration of a row of rank 0 is -2"),
        (lambda: check_orders(["F0 B0"], microbatches=10**9), "The number of microbatches is 1,000,000,000"),
    ):  # fmt: skip
        with pytest.raises(ScheduleError, match=words):
            call()
    with pytest.raises(TypeError, match="A Schedule is needed"):
        check_schedule([["F0"]])
