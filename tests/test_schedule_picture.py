"""Pictures of pipeline schedules against geometry worked out by hand: boxes, numbers, peaks, and what is left out."""

import re
import xml.etree.ElementTree as ElementTree
from fractions import Fraction

import numpy as np
import pytest

from lessons_lib import plots
from lessons_lib.hardware import Cluster, Device, Link
from lessons_lib.parallel.schedules import gpipe, interleaved, one_f_one_b, table_from, timed, zero_bubble_h1
from lessons_lib.plots.schedule_picture import KINDS, LEFT, boxes_in, boxes_of, pipeline_height, pipeline_svg, schedule_svg
from lessons_lib.recording import RankLog, Recording
from lessons_lib.replay import replay

SVG = "{http://www.w3.org/2000/svg}"
SECOND = Device(flops=1e9, memory=1e9, memory_bandwidth=1e30, efficiency=1.0, name="toy")
TOY = Cluster(SECOND, devices_per_node=100, intra_node=Link(1000.0, 0.0, "toy link"))


def recorded(schedule, nbytes=0):
    """A recording of this schedule with its durations as seconds: messages between neighbours, sends not waited for."""
    logs = [RankLog(r, schedule.ranks) for r in range(schedule.ranks)]
    p, stages = schedule.ranks, schedule.ranks * schedule.chunks
    for cell in schedule.cells:
        log, stage = logs[cell.rank], cell.chunk * p + cell.rank
        step = {"F": 1, "B": -1}.get(cell.kind, 0)
        tag = 2 * (cell.microbatch * 100 + cell.chunk) + (step < 0)
        label = str(cell.action)
        before, after = stage - step, stage + step
        if step and 0 <= before < stages and p > 1:
            source_tag = 2 * (cell.microbatch * 100 + before // p) + (step < 0)
            log.recv(before % p, nbytes, tag=source_tag, label=label)
        log.compute(flops=float(cell.duration) * 1e9, label=label)
        if step and 0 <= after < stages and p > 1:
            log.send(after % p, nbytes, tag=tag, label=label, blocking=False)
    return Recording.from_logs(logs)


def strokes(svg, kind):
    """(start, length) in pixels of every box of this kind, in the order of the rows."""
    parts = [part for part in ElementTree.fromstring(svg) if part.get("class") != "legend"]
    paths = [p for part in parts for p in part.iter(f"{SVG}path") if p.get("class") == kind]
    return [(int(a) / 10, int(b) / 10) for p in paths for a, b in re.findall(r"M(-?\d+) 0h(\d+)", p.get("d"))]


def numbers(svg):
    """Everything that is written into boxes."""
    groups = [g for g in ElementTree.fromstring(svg).iter(f"{SVG}g") if g.get("class") == "numbers"]
    return [t.text for g in groups for t in g]


def test_boxes_lie_where_the_table_says():
    schedule = timed(gpipe(2, 2), backward=2)  # 2 ranks: F0 F1 . . B0 B0 B1 B1 on the first ends at 9 slots
    svg = schedule_svg(schedule, width=LEFT + 26 + 78 + 450)  # 450 pixels for 9 slots
    assert schedule.makespan == 9
    gap = 0.8  # neighbours stay apart
    assert strokes(svg, "F") == [(0, 50 - gap), (50, 50 - gap), (50, 50 - gap), (100, 50 - gap)]
    assert strokes(svg, "B") == [(250, 100 - gap), (350, 100 - gap), (150, 100 - gap), (250, 100 - gap)]
    assert sorted(numbers(svg)) == ["B0", "B0", "B1", "B1", "F0", "F0", "F1", "F1"]


@pytest.mark.parametrize("orders, peaks", [
    (gpipe(4, 8), "8 8 8 8"), (one_f_one_b(4, 8), "4 3 2 1"), (zero_bubble_h1(4, 8), "4 (4) 3 (4) 2 (4) 1 (4)"),
])  # fmt: skip
def test_the_peak_in_flight_stands_beside_each_row(orders, peaks):
    svg = schedule_svg(timed(orders))
    beside = [g for g in ElementTree.fromstring(svg) if g.get("text-anchor") == "middle" and g.get("font-size") == "12"]
    assert " ".join(t.text for t in beside[0]) == peaks


def test_kinds_differ_in_shape_and_the_legend_names_them():
    svg = schedule_svg(timed(zero_bubble_h1(2, 2)))
    root = ElementTree.fromstring(svg)
    tall = {k: {p.get("stroke-width") for p in root.iter(f"{SVG}path") if p.get("class") == k} for k in KINDS}
    assert len(set(map(str, tall.values()))) == 2  # W is lower, and hollow; B has a foot of its own
    assert svg.count('stroke="#6e2f52"') == 2 + 1 and "W gradient of the weights" in svg
    assert "B backward" in schedule_svg(timed(gpipe(2, 2))) and "lighter: later chunks" in schedule_svg(timed(interleaved(2, 2, 2)))


def test_a_later_chunk_is_lighter_and_its_number_has_its_chunk_where_there_is_room():
    svg = schedule_svg(timed(interleaved(2, 2, 2)))
    assert {"F0", "F0.1", "B1.1"} <= set(numbers(svg))
    root = ElementTree.fromstring(svg)
    assert len({p.get("stroke") for p in root.iter(f"{SVG}path") if p.get("class") == "F"}) == 2


@pytest.mark.parametrize("width, forward, backward", [(760, True, True), (460, False, True), (300, False, False)])
def test_numbers_go_kind_by_kind_where_they_do_not_fit(width, forward, backward):
    """8 ranks, 12 microbatches, F 1 and B 2: 57 slots on 594, 294 and 134 pixels."""
    shown = numbers(schedule_svg(timed(one_f_one_b(8, 12), backward=2), width=width))
    assert len(shown) == 96 * (forward + backward) and set(shown) <= set(map(str, range(12)))


def test_a_table_that_cannot_run_is_drawn_as_it_is_written():
    svg = schedule_svg(table_from(["F0 F1 B1 B0", "F0 F1 B0 B1"]))
    assert strokes(svg, "F")[:2] == strokes(svg, "F")[2:] and "none that I know" in svg
    assert "An empty schedule of 2 ranks" in schedule_svg(table_from([".", "."]))


def test_fractions_floats_and_many_actions_have_pictures():
    assert "5/2" not in schedule_svg(timed(gpipe(2, 2), forward=Fraction(1, 3)))
    seconds = schedule_svg(timed(gpipe(2, 2), forward=0.001, backward=0.002))
    assert ">time</text>" in seconds and ">slot</text>" not in seconds
    many = timed(one_f_one_b(64, 256))
    assert len(schedule_svg(many)) < 1_500_000 and numbers(schedule_svg(many)) == []
    assert "first 64 of 70" in schedule_svg(timed(gpipe(70, 2)))


@pytest.mark.parametrize("bad, words", [
    (dict(schedule=None), "A Schedule is needed, from timed(...) or table_from(...), not None"),
    (dict(schedule=gpipe(2, 2)), "A Schedule is needed"),
    (dict(width=20), "The picture's width in pixels is 20, but must be a whole number from 300 to 10,000"),
    (dict(width=True), "must be a whole number"),
    (dict(until=5), "until is 5, but this schedule takes 6 slots: name a time that is not shorter"),
    (dict(until=float("nan")), "until, the end of the time axis, is nan"),
])  # fmt: skip
def test_bad_input_is_refused_in_a_sentence(bad, words):
    with pytest.raises((TypeError, ValueError), match=re.escape(words)):
        schedule_svg(**{"schedule": timed(gpipe(2, 2)), **bad})


def test_two_schedules_on_one_scale():
    a, b = timed(gpipe(2, 2)), timed(gpipe(2, 4))
    first, second = schedule_svg(a, until=10), schedule_svg(b)
    assert b.makespan == 10 and strokes(first, "F")[0] == strokes(second, "F")[0]


def test_a_schedule_shows_itself_in_a_notebook():
    html = timed(gpipe(2, 2))._repr_html_()
    assert html.startswith("<img ") and 'alt="GPipe: 2 ranks, 2 microbatches; 6 slots' in html


# ---- from a timeline ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("orders", [gpipe(3, 4), one_f_one_b(4, 7), interleaved(2, 6, 3), zero_bubble_h1(3, 5)])
def test_on_an_instant_link_a_timeline_has_the_boxes_of_its_table(orders):
    schedule = timed(orders, forward=1, backward=2, weight=1)
    timeline = replay(recorded(schedule), TOY)
    assert timeline.step_time == pytest.approx(schedule.makespan)
    table, seen = boxes_of(schedule), boxes_in(timeline)
    for name in ("rank", "start", "end", "kind", "microbatch", "chunk"):
        assert getattr(seen, name).tolist() == pytest.approx(getattr(table, name).tolist())
    width = 760
    drawn, whole = pipeline_svg(timeline, width=width), schedule_svg(schedule, width=width + 78, until=float(timeline.step_time))
    same = pipeline_svg(timeline, width=width, until=float(timeline.step_time))
    assert all(strokes(same, k) == strokes(whole, k) for k in KINDS) and numbers(drawn)
    height = float(ElementTree.fromstring(drawn).get("height"))
    assert height == pipeline_height(schedule.ranks, schedule.split, schedule.chunks, width)


def test_a_slow_link_shows_exposed_communication_and_transfers():
    svg = pipeline_svg(replay(recorded(timed(gpipe(2, 2)), nbytes=500), TOY))  # half a slot a message
    root = ElementTree.fromstring(svg)
    assert [p for p in root.iter(f"{SVG}path") if p.get("class") == "communication"]
    assert [g for g in root.iter(f"{SVG}g") if g.get("class") == "transfers"]
    assert "Replayed: step 8.00 s" in svg  # 6 slots, and four messages that begin when their receiver is ready for them


def test_computing_with_other_labels_is_left_out_and_pieces_of_one_action_are_one_box():
    log = RankLog(0, 1)
    for label, seconds in (("F0", 1), ("F0", 2), ("optimizer", 1), ("B0", 1), ("B0x", 1), ("", 1)):
        log.compute(flops=seconds * 1e9, label=label)
    boxes = boxes_in(replay(Recording.from_logs([log]), TOY))
    assert [(KINDS[k], i, a, b) for k, i, a, b in zip(boxes.kind, boxes.microbatch, boxes.start, boxes.end)] == [
        ("F", 0, 0.0, 3.0), ("B", 0, 4.0, 5.0),
    ]  # fmt: skip
    empty = RankLog(0, 1)
    empty.compute(flops=0)
    timeline = replay(Recording.from_logs([empty]), TOY)
    assert len(boxes_in(timeline).rank) == 0 and "step 0 s" in pipeline_svg(timeline) and np.isfinite(timeline.step_time)


def test_the_front_door_has_both():
    assert plots.schedule_svg is schedule_svg and plots.pipeline_svg is pipeline_svg
    with pytest.raises(AttributeError, match="no 'schedules'; it has: .*schedule_svg"):
        plots.schedules  # noqa: B018
