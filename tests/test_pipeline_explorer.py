"""The pipeline widget, driven from Python as the browser would drive it: it shows a replay of the schedule's own recording."""

import asyncio
import math
import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

import lessons_lib
from lessons_lib import explore_pipeline, shapes
from lessons_lib.explorers import pipeline_explorer as live
from lessons_lib.explorers.pipeline_setting import SCHEDULES, Setting, seconds
from lessons_lib.hardware import A100, ETHERNET_10G, H100, IB_NDR, Cluster, Device, Link
from lessons_lib.parallel.schedules import ScheduleError
from lessons_lib.pipelines import memory_of_ranks
from lessons_lib.plots.pipeline_panels import bubbles_svg, memory_svg
from lessons_lib.plots.schedule_picture import pipeline_svg
from lessons_lib.plots.wording import format_time, totals
from lessons_lib.replay import replay
from lessons_lib.splitting import bubble_overhead, bubble_share

SHAPE = shapes.GPT3_13B  # 40 layers
INSTANT = Link(1e30, 0.0, "instant")
ALL = list(SCHEDULES)


def setting(schedule="1F1B", stages=4, microbatches=8, chunks=2, ratio=2.0, shape=SHAPE, device=H100):
    return Setting(shape, device, 2048, 1, schedule, stages, microbatches, chunks, ratio)


def equal_stages():
    """A shape whose stages compute alike: the logits of a vocabulary of one are next to nothing."""
    return shapes.gpt(96, 4096, 32, 1, 2048, "equal stages")


# ---- the replay against the table ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ALL)
@pytest.mark.parametrize("stages, microbatches, chunks, ratio", [(4, 8, 2, 2.0), (2, 6, 3, 1.0), (8, 32, 2, 3.0), (3, 3, 2, 0.5)])
@pytest.mark.parametrize("device", [H100, Device(1e15, 1e12, 1e15, name="no launches")])
def test_on_an_instant_link_the_replay_is_the_tables_own_makespan(schedule, stages, microbatches, chunks, ratio, device):
    now = setting(schedule, stages, microbatches, chunks, ratio, device=device)
    timeline = replay(now.recording, Cluster(device, devices_per_node=stages, intra_node=INSTANT))
    table = now.table()
    assert timeline.step_time == pytest.approx(float(table.makespan), rel=1e-9)
    assert totals(timeline)[:, 0].tolist() == pytest.approx([float(b) for b in table.busy], rel=1e-9)
    step, ideal, *_ = now.compared[schedule]
    assert (step, ideal) == pytest.approx((timeline.step_time, totals(timeline)[:, 0].mean()), rel=1e-9)


@pytest.mark.parametrize("p, m", [(4, 8), (8, 32), (3, 12), (2, 2)])
@pytest.mark.parametrize("schedule, chunks", [("GPipe", 1), ("1F1B", 1), ("interleaved 1F1B", 2), ("interleaved 1F1B", 4)])
def test_with_equal_stages_both_bubbles_are_the_closed_forms(p, m, schedule, chunks):
    explorer = explore_pipeline(equal_stages(), link=INSTANT, schedule=schedule, stages=p, microbatches=m, chunks=chunks, ratio=2.0)
    over, share = bubble_overhead(p, m, chunks), bubble_share(p, m, chunks)
    found = re.search(r"the bubble is ([\d.]+)% over ideal, ([\d.]+)% of the step idle", explorer.sentence)
    assert float(found[1]) == pytest.approx(100 * over, abs=0.11) and float(found[2]) == pytest.approx(100 * share, abs=0.11)
    assert "The link adds next to nothing" in explorer.sentence


@pytest.mark.parametrize("p, m", [(4, 8), (8, 32)])
def test_zero_bubble_idles_what_the_paper_says(p, m):
    """(p-1)(F+B-W) of a step of 3m slots with F = B = W [arXiv:2401.10241]."""
    explorer = explore_pipeline(equal_stages(), link=INSTANT, schedule="ZB-H1", stages=p, microbatches=m, ratio=2.0)
    found = re.search(r"the bubble is ([\d.]+)% over ideal", explorer.sentence)
    assert float(found[1]) == pytest.approx(100 * (p - 1) / (3 * m), abs=0.11)


def test_seconds_are_those_of_replay():
    forward, _, _ = setting().works()
    timeline = replay(setting(stages=4, microbatches=1).recording, Cluster(A100, devices_per_node=4))
    spans = [s for s in timeline.spans if s.kind == "compute" and s.label == "F0"]
    assert [s.duration for s in spans] == pytest.approx([seconds(one, A100) for one in forward], rel=1e-9)


def test_backward_takes_the_ratio_of_forward_and_the_weights_half_at_most_one():
    cases = [
        ("1F1B", 2.5, {"B": 2.5}),
        ("ZB-H1", 1.5, {"B": 0.75, "W": 0.75}),
        ("ZB-H1", 2, {"B": 1, "W": 1}),
        ("ZB-H1", 3, {"B": 2, "W": 1}),
    ]
    for schedule, ratio, parts in cases:  # 3: with full recomputation, which comes before B
        forward, backward, weight = setting(schedule, ratio=ratio, device=Device(1e15, 1e12, 1e30)).works()
        for kind, works in (("B", backward), ("W", weight)):
            if kind in parts:
                for f, one in zip(forward, works):
                    assert one.flops / f.flops == pytest.approx(parts[kind], rel=1e-6)


# ---- what it shows --------------------------------------------------------------------------------------------------------------


def all_shown(explorer):
    return explorer.picture.value + explorer.panels.value


def assert_shows(explorer):
    """Timeline, words and panels are those of the setting and the link."""
    now, link = explorer.setting, explorer.link
    expected = replay(now.recording, Cluster(now.device, devices_per_node=now.stages, intra_node=link))
    assert explorer.error is None and explorer.timeline.step_time == expected.step_time
    chunks = now.chunks if now.schedule == "interleaved 1F1B" else 1
    assert pipeline_svg(expected, chunks, live.DRAWN, area=live.AREA) in explorer.picture.value
    step, computing = expected.step_time, totals(expected)[:, 0].mean()
    alone = float(now.table().makespan)
    told = explorer.sentence
    assert told.startswith(f"Replayed: step {format_time(step)}; the bubble is {step / computing - 1:.1%} over ideal, ")
    assert f"{1 - computing / step:.1%} of the step idle" in told and f"to the {format_time(alone)} of the schedule alone" in told
    added = step - alone
    if added > 1e-3 * alone:
        assert f"The link adds {format_time(added)} ({added / alone:.1%})" in told
    assert f"at most {max(now.table().peak_in_flight)} " in told
    memory = memory_of_ranks(now.shape, now.orders(), now.sequence, now.sequences)
    assert memory_svg([m.states for m in memory], [m.activations for m in memory], now.device.memory) in explorer.panels.value
    assert bubbles_svg(now.compared, now.schedule) in explorer.panels.value
    fullest = max(memory, key=lambda m: m.total)
    fits = "fits into" if fullest.total <= now.device.memory else "does not fit into"
    assert f"rank {fullest.rank} needs the most" in explorer.picture.value and f"that {fits} the" in explorer.picture.value
    assert f"{now.schedule}: {now.shape.name} on {now.stages} rank" in explorer.picture.value


def test_it_opens_as_asked():
    explorer = explore_pipeline(SHAPE, A100, ETHERNET_10G, schedule="ZB-H1", stages=5, microbatches=11, ratio=2.25)
    assert (explorer.schedule.value, explorer.stages.value, explorer.microbatches.value) == ("ZB-H1", 5, 11)
    assert explorer.ratio.value == 2.25 and explorer.bandwidth.value == pytest.approx(1.25)
    assert explorer.cluster.device is A100 and explorer.cluster.intra_node is ETHERNET_10G
    assert_shows(explorer)


def test_every_move_shows_the_replay_of_its_setting():
    explorer = explore_pipeline(SHAPE, stages=4, microbatches=8)
    rng = np.random.default_rng(7)
    seen, sizes = 0, set()
    for _ in range(40):
        name = ("schedule", "stages", "microbatches", "chunks", "ratio", "bandwidth", "latency")[rng.integers(7)]
        control = getattr(explorer, name)
        if name == "schedule":
            control.value = ALL[rng.integers(4)]
        elif name == "bandwidth":
            control.value = float(10 ** rng.uniform(0, 2.9))
        elif name == "latency":
            control.value = float(10 ** rng.uniform(0, 3.9))
        else:
            values = [value for _, value in control.options if value <= 12]
            control.value = values[rng.integers(len(values))]
        sizes.add(tuple(re.findall(r'<svg [^>]*width="(\d+)"', all_shown(explorer))))
        sizes.add(tuple(re.findall(r"aspect-ratio:([\d./]+)", all_shown(explorer))))
        if explorer.error is None:
            assert_shows(explorer)
            seen += 1
        else:
            assert isinstance(explorer.error, ValueError) and "cannot run" in explorer.sentence
    assert seen > 10 and len(sizes) == 2


def test_a_move_of_the_link_replays_once_and_records_nothing(monkeypatch):
    calls = []
    monkeypatch.setattr(live, "replay", lambda *a: calls.append("replay") or replay(*a))
    explorer = explore_pipeline(SHAPE, stages=4, microbatches=8)
    before = explorer.setting
    explorer.bandwidth.value = 5.0
    explorer.latency.value = 100.0
    assert calls == ["replay"] * 3 and explorer.setting is before
    assert explorer.link.bandwidth == 5e9 and explorer.link.latency == pytest.approx(1e-4)
    explorer.bandwidth.value = 5.0 * (1 + 1e-15)
    assert len(calls) == 3  # the browser's last digit is no move


def test_a_move_of_the_link_sends_one_message_and_any_other_the_panels_after_the_picture(monkeypatch):
    explorer, sent = explore_pipeline(SHAPE, stages=4, microbatches=8), []
    for widget in (explorer, explorer.picture, explorer.panels, explorer.stages, explorer.chunks, explorer.latency):
        monkeypatch.setattr(widget, "send_state", lambda key=None, widget=widget: sent.append((widget, key)))
    explorer.bandwidth.value = 5.0
    assert sent == [(explorer.picture, "value")]
    explorer.microbatches.value = 10
    assert sent[1:] == [(explorer.picture, "value"), (explorer.panels, "value")]


def test_in_a_kernel_the_panels_come_after_the_picture_and_once_for_several_moves(monkeypatch):
    explorer, drawn = explore_pipeline(SHAPE, stages=4, microbatches=8), []
    draw = explorer._draw_panels
    monkeypatch.setattr(explorer, "_draw_panels", lambda: drawn.append(explorer.stages.value) or draw())

    async def moves():
        before = explorer.panels.value
        for stages in (5, 6, 8):
            explorer.stages.value = stages
            assert " on 8 ranks" in explorer.picture.value or stages < 8
        assert drawn == [] and explorer.panels.value == before
        await asyncio.sleep(3 * live.SOON)
        assert drawn == [8]

    asyncio.run(moves())
    assert_shows(explorer)


def test_a_slow_link_is_told_and_a_fast_one_comes_back_with_its_name():
    explorer = explore_pipeline(SHAPE, stages=4, microbatches=8)
    first = explorer.sentence
    explorer.bandwidth.value = explorer.bandwidth.value / 40
    assert_shows(explorer)
    added = float(re.search(r"The link adds .*? \(([\d.]+)%\)", explorer.sentence)[1])
    assert added > 5 and 'class="communication"' in explorer.picture.value
    explorer.bandwidth.value = 50.0
    assert explorer.link is IB_NDR and explorer.sentence == first


@pytest.mark.parametrize("change, words", [
    (dict(schedule="interleaved 1F1B", microbatches=10), "in groups of p = 4, but m is 10: choose a multiple of 4"),
    (dict(schedule="interleaved 1F1B", chunks=1), "Interleaved 1F1B needs 2 chunks a rank or more: with 1 it is 1F1B"),
    (dict(schedule="interleaved 1F1B", stages=8, chunks=8), "40 layers cannot fill 64 stages"),
])  # fmt: skip
def test_an_impossible_combination_is_told_and_keeps_the_pictures_place(change, words):
    explorer = explore_pipeline(SHAPE, stages=4, microbatches=8)
    place = re.findall(r"aspect-ratio:([\d./]+)", all_shown(explorer))
    for name, value in change.items():
        getattr(explorer, name).value = value
    assert isinstance(explorer.error, ValueError) and explorer.timeline is None
    assert explorer.sentence.startswith("This combination cannot run.") and words in explorer.sentence
    assert "visibility:hidden" in explorer.picture.value and "visibility:hidden" in explorer.panels.value
    assert words in explorer.picture.value
    assert re.findall(r"aspect-ratio:([\d./]+)", all_shown(explorer)) == place
    explorer.schedule.value = "1F1B"
    assert_shows(explorer)
    assert "visibility:hidden" not in all_shown(explorer)


def test_anything_else_that_fails_is_told_with_its_name(monkeypatch):
    explorer = explore_pipeline(SHAPE, stages=4, microbatches=8)

    def fail(*_):
        raise RuntimeError("the link <melted>")

    monkeypatch.setattr(live, "replay", fail)
    explorer.bandwidth.value = 5.0
    assert explorer.sentence == "This cannot be replayed. RuntimeError: the link <melted>"
    assert "the link &lt;melted&gt;" in explorer.picture.value


@pytest.mark.parametrize("given, words", [
    (dict(shape=None), "The shape must be one such as shapes.LLAMA3_70B, not None"),
    (dict(device=None), "The device must be a hardware.Device"),
    (dict(link=50e9), "The link must be a hardware.Link"),
    (dict(schedule="2F2B"), "There is no schedule '2F2B' here; choose one of 'GPipe', '1F1B'"),
    (dict(schedule=None), "There is no schedule None"),
    (dict(stages=0), "stages (ranks of the pipeline) is 0, but must be a whole number from 1 to 64"),
    (dict(stages=True), "stages (ranks of the pipeline) must be a whole number"),
    (dict(stages=41), "40 layers cannot fill 41 stages"),
    (dict(microbatches=-1), "microbatches (of a step) is -1"),
    (dict(microbatches=2.5), "microbatches (of a step) must be a whole number"),
    (dict(chunks=17), "chunks (stages on each rank) is 17"),
    (dict(ratio=0), "ratio (backward / forward) is 0, but must be a number from 0.1 to 10"),
    (dict(ratio=math.nan), "ratio (backward / forward) is nan"),
    (dict(ratio=11), "ratio (backward / forward) is 11"),
    (dict(ratio="2"), "ratio (backward / forward) must be"),
    (dict(sequence=4096), "sequence (tokens) is 4,096, but must be a whole number from 1 to 2,048"),
    (dict(sequences=0), "sequences (of a microbatch) is 0"),
    (dict(recompute="some"), "recompute must be one of 'none', 'selective', 'full', not 'some'"),
    (dict(schedule="interleaved 1F1B", microbatches=9), "choose a multiple of 8"),
])  # fmt: skip
def test_bad_input_is_refused_in_a_sentence(given, words):
    with pytest.raises((TypeError, ValueError), match=re.escape(words)):
        explore_pipeline(**{"shape": SHAPE, **given})


def test_names_and_units_are_text_beside_the_sliders():
    explorer = explore_pipeline(SHAPE)
    texts = []

    def walk(widget):
        for child in getattr(widget, "children", ()):
            texts.append(getattr(child, "value", ""))
            walk(child)

    walk(explorer)
    for words in ("Stages p, one a rank", "Microbatches m", "Chunks v a rank (interleaved)", "Backward takes this many forwards",
                  "Bandwidth of the link, in GB/s per direction", "Latency of the link, in us per message"):  # fmt: skip
        assert words in texts
    assert [option for option, _ in explorer.ratio.options][:2] == ["0.5", "0.75"]


# ---- the panels -----------------------------------------------------------------------------------------------------------------


def test_memory_bars_have_the_lengths_of_the_bytes():
    svg = memory_svg([40e9, 20e9], [10e9, 0.0], 80e9)
    root = ElementTree.fromstring(svg)
    solid = [float(r.get("width")) for r in root.iter("{http://www.w3.org/2000/svg}rect")][1:3]
    striped = [p for p in root.iter("{http://www.w3.org/2000/svg}path") if p.get("stroke") == "#CC79A7"]
    a, b = (float(x) for x in re.match(r"M([\d.]+) [\d.]+L([\d.]+)", striped[0].get("d")).groups())
    assert len(striped) == 2  # one is the legend's
    assert solid[0] / solid[1] == pytest.approx(2, rel=0.01) and (b - a) / solid[0] == pytest.approx(0.25, rel=0.01)
    texts = [t.text for t in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"50 GB", "20 GB", "device 80 GB", "rank 0", "rank 1"} <= set(texts)
    bold = [t.text for t in root.iter("{http://www.w3.org/2000/svg}text") if t.get("font-weight")]
    assert bold == ["Predicted: peak memory of each rank"]
    assert re.search(r'font-weight="bold">90 GB</text>', memory_svg([90e9], [0.0], 80e9))  # too much


@pytest.mark.parametrize("ranks", [1, 8, 32, 64])
@pytest.mark.parametrize("size", [0.0, 1.0, 3e12])
def test_memory_of_any_size_has_a_picture(ranks, size):
    root = ElementTree.fromstring(memory_svg([size] * ranks, [size / 3] * ranks, 80e9))
    assert root.get("height") == "280"


def test_every_schedule_has_a_row_with_both_definitions_or_the_reason_why_not():
    svg = bubbles_svg({"GPipe": (1.5, 1.0, "8 in flight", ""), "interleaved 1F1B": "needs m to be a multiple of 4"}, "GPipe")
    assert "GPipe: 1.50 s, 8 in flight" in svg and "50.0% over ideal, 33.3% of the step idle" in svg
    assert "needs m to be a multiple of 4" in svg and svg.count('class="shown"') == 1
    compared = setting(microbatches=10).compared
    assert compared["interleaved 1F1B"] == "needs m to be a multiple of 4"
    assert setting(chunks=1).compared["interleaved 1F1B"] == "needs 2 chunks a rank or more"
    assert setting(stages=8, chunks=8).compared["interleaved 1F1B"] == "needs fewer stages"
    assert setting().compared["1F1B"][2:] == ("4 in flight", "4 microbatches")
    assert setting().compared["interleaved 1F1B"][2] == "11 chunks in flight"
    with pytest.raises(ScheduleError):
        setting("interleaved 1F1B", chunks=1).orders()


# ---- what is stored -------------------------------------------------------------------------------------------------------------


def test_a_cell_stores_pictures_and_findings_that_do_not_change_with_the_sliders(monkeypatch):
    import IPython.display

    explorer, outputs = explore_pipeline(SHAPE, stages=4, microbatches=8), []
    monkeypatch.setattr(IPython.display, "display", lambda data, raw: outputs.append(data))
    explorer._ipython_display_()
    first = explorer.sentence
    explorer.stages.value = 2
    explorer._ipython_display_()
    (a, shown), (b, _) = outputs[:2], outputs[2:]
    assert a == b and a["text/html"].count('src="data:image/svg+xml;base64,') == 3 and first in a["text/html"]
    lines = a["text/plain"].splitlines()
    assert lines[0] == first and lines[1].startswith(
        "1F1B: GPT-3 13B on 4 ranks, 10 layers each; 8 microbatches of 1 x 2,048 tokens"
    )
    assert [line.split("|")[0].strip() for line in lines[3:7]] == ["rank 0", "rank 1", "rank 2", "rank 3"]
    assert shown["text/plain"] == "Explorer of pipelines; its sliders appear where a kernel runs"


def test_it_is_a_public_name():
    assert lessons_lib.explore_pipeline is explore_pipeline
