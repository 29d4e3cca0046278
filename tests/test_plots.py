"""Pictures of timelines against geometry worked out by hand, and their text forms against the numbers they show."""

import base64
import re
import time
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from lessons_lib import plots
from lessons_lib.hardware import Cluster, Device, Link
from lessons_lib.plots.curve_picture import breakdown_svg, curve_frame
from lessons_lib.plots.svg import clip
from lessons_lib.plots.timeline_picture import LEFT, RIGHT, TOP, merged
from lessons_lib.plots.wording import format_time, percent, sentence
from lessons_lib.recording import RankLog, Recording
from lessons_lib.replay import measured, replay

SVG = "{http://www.w3.org/2000/svg}"
SECOND = Device(flops=1e9, memory=1e9, memory_bandwidth=1e30, efficiency=1.0, name="toy")  # 1e9 FLOPs take one second
TOY = Cluster(SECOND, devices_per_node=100, intra_node=Link(1000.0, 0.0, "toy link"))  # 1000 bytes take one second


def two_ranks(label="work", nbytes=1000):
    """Rank 0 computes 1 s, sends 1 s; rank 1 computes 0.5 s, waits idle 0.5 s, receives 1 s, computes 2 s: the step takes 4 s."""
    a, b = RankLog(0, 2), RankLog(1, 2)
    a.compute(flops=1e9, label=label)
    a.send(1, nbytes)
    b.compute(flops=5e8)
    b.recv(0, nbytes)
    b.compute(flops=2e9, label=label)
    return Recording.from_logs([a, b])


def random_timeline(seed, ranks, events):
    """Ranks that compute for random times and all-reduce."""
    rng = np.random.default_rng(seed)
    logs = [RankLog(r, ranks) for r in range(ranks)]
    for _ in range(events):
        for log in logs:
            log.compute(flops=float(rng.integers(1, 1e9)))
            log.collective("all_reduce", 1000)
    return replay(Recording.from_logs(logs), TOY)


def tree(svg):
    return ElementTree.fromstring(svg)


def strokes(element):
    """(start, length) in pixels of every bar in a path of bars."""
    return [(int(a) / 10, int(b) / 10) for a, b in re.findall(r"M(-?\d+) 0h(\d+)", element.get("d"))]


def paths(svg, kind):
    return [p for p in tree(svg).iter(f"{SVG}path") if kind in (p.get("class") or "").split()]


# ---- the timeline as SVG -------------------------------------------------------------------------------------------------


def test_bars_lie_where_the_times_are():
    svg = plots.timeline_svg(replay(two_ranks(), TOY), width=488, until=4.0)  # 488 - 62 - 26 = 400 pixels for 4 s
    assert (LEFT, RIGHT) == (62, 26)
    gap = 0.6  # wide bars end a little early, so that neighbours stay apart
    assert [strokes(p) for p in paths(svg, "compute")] == [[(0, 100 - gap)], [(0, 50 - gap), (200, 200 - gap)]]
    assert [strokes(p) for p in paths(svg, "communication")] == [[(100, 100 - gap)], [(100, 100 - gap)]]
    assert [strokes(p) for p in paths(svg, "idle")] == [[(200, 200 - gap)], [(50, 50 - gap)]]


def test_rows_lie_under_each_other_and_axis_and_end_of_step_are_drawn():
    svg = plots.timeline_svg(replay(two_ranks(), TOY), width=488, until=5.0)
    rows = [g.get("transform") for g in tree(svg) if (g.get("transform") or "").startswith("translate")]
    assert rows == ["translate(62 42) scale(.1)", "translate(62 78) scale(.1)"]  # 32 above, bars of 20, 36 from row to row
    words = [t.text for t in tree(svg).iter(f"{SVG}text")]
    assert [w for w in words if w in ("0", "1 s", "2 s", "3 s", "4 s", "5 s")] == ["0", "1 s", "2 s", "3 s", "4 s", "5 s"]
    assert f"M{LEFT + 4 / 5 * 400:g} {TOP - 4}L{LEFT + 4 / 5 * 400:g}" in svg
    assert "Replayed: step 4.00 s" in words and "2 ranks on toy over toy link (1 kB/s)" in words


def test_kinds_differ_in_height_and_texture_and_the_legend_names_them():
    svg = plots.timeline_svg(replay(two_ranks(), TOY))
    look = {k: (paths(svg, k)[0].get("stroke-width"), paths(svg, k)[0].get("stroke-dasharray"), paths(svg, k)[0].get("stroke"))
            for k in ("compute", "communication", "idle")}  # fmt: skip
    assert len({width for width, _, _ in look.values()}) == len({dash for _, dash, _ in look.values()}) == 3
    legend = next(g for g in tree(svg) if g.get("class") == "legend")
    assert [t.text for t in legend.iter(f"{SVG}text")] == [
        "compute", "communication (the rank waits)", "idle", "transfers, out above, in below",
    ]  # fmt: skip


def test_transfers_lie_under_the_rows_out_above_in():
    svg = plots.timeline_svg(replay(two_ranks(), TOY), width=488, until=4.0)
    group = next(g for g in tree(svg) if g.get("class") == "transfers")
    drawn = {g.get("transform"): [strokes(p) for p in g.findall(f"{SVG}path")] for g in group}
    out, into = "translate(62 55.5) scale(.1)", "translate(62 95.5) scale(.1)"  # under rank 0, first lane; under rank 1, second
    assert drawn == {out: [[(100, 99.4)]], into: [[(100, 99.4)]]}
    titles = [t.text for t in group.iter(f"{SVG}title")]
    assert titles == ["send 1.0 kB, rank 0 to rank 1\nfrom 1.00 s, takes 1.00 s"] * 2


def test_a_hidden_transfer_is_drawn_although_nobody_waits_for_it():
    logs = [RankLog(r, 2) for r in range(2)]
    for log in logs:
        handle = log.collective("all_reduce", 1000, blocking=False)
        log.compute(flops=3e9)
        log.wait(handle)
    svg = plots.timeline_svg(replay(Recording.from_logs(logs), TOY))
    assert not paths(svg, "communication")
    group = next(g for g in tree(svg) if g.get("class") == "transfers")
    assert len(list(group)) == 2 and "all_reduce 1.0 kB, 2 ranks" in svg


def test_every_wide_span_has_a_tooltip_with_label_detail_start_and_duration():
    svg = plots.timeline_svg(replay(two_ranks("forward 3"), TOY))
    titles = [t.text for g in tree(svg) if g.get("class") is None for t in g.iter(f"{SVG}title")]
    assert titles == [
        "forward 3; compute\nfrom 0 s, takes 1.00 s",
        "send 1.0 kB to rank 1; communication\nfrom 1.00 s, takes 1.00 s",
        "finished; idle\nfrom 2.00 s, takes 2.00 s",
        "compute\nfrom 0 s, takes 500 ms",
        "recv 1.0 kB from rank 0; idle\nfrom 500 ms, takes 500 ms",
        "recv 1.0 kB from rank 0; communication\nfrom 1.00 s, takes 1.00 s",
        "forward 3; compute\nfrom 2.00 s, takes 2.00 s",
    ]


@pytest.mark.parametrize(
    "label", ["<b>\"&'", "two\nlines\tand a tab", "bell\x07 and \ud800 and \ufffe", "größer 並列 🚀", "x" * 5000, "]]>"]
)
def test_any_label_gives_well_formed_svg_with_that_label_in_it(label):
    svg = plots.timeline_svg(replay(two_ranks(label), TOY))
    text = "".join(ElementTree.fromstring(svg).itertext())
    shown = re.sub("[\x07\ud800\ufffe]", "?", " ".join(label.split()))
    assert f"{shown}; compute" in text
    assert len(svg) < 12_000 + 4 * len(label)


def test_labels_are_written_where_they_fit_and_shortened_where_they_nearly_do():
    def written(label, width):
        svg = plots.timeline_svg(replay(two_ranks(label), TOY), width=width, until=4.0)
        return [t.text for g in tree(svg) if g.get("class") == "labels" and g.get("fill") == "#fff" for t in g]

    assert written("forward 12", 760) == ["forward 12"] * 2  # 168 and 336 pixels
    assert written("forward 12", 300) == ["fo… 12", "forward 12"]  # 53 and 106 pixels: the number stays
    assert written("a very long name of a part", 300)[0].endswith("…")
    assert clip("forward 12", 11, 20) == "" and clip("abc", 11, 100) == "abc"


def test_the_picture_is_described_and_names_the_kind_of_number():
    timeline = replay(two_ranks(), TOY)
    root = tree(plots.timeline_svg(timeline))
    assert root.get("role") == "img" and root.get("aria-label") == f"{sentence(timeline)} {timeline.title}"
    assert root[0].get("fill") == "#fff"  # its own ground: readable in a dark theme


def test_a_measured_timeline_says_so():
    log = RankLog(0, 1)
    log.compute(flops=1, start=0.0, end=0.5)
    timeline = measured(Recording.from_logs([log]))
    assert "Measured: step 500 ms" in plots.timeline_svg(timeline)
    assert plots.timeline_text(timeline).startswith("Measured: step 500 ms")
    assert plots.breakdown_text(timeline).startswith("Measured")


@pytest.mark.parametrize("ranks", [1, 2, 8, 9, 16, 17, 32, 33, 64])
def test_size_depends_on_the_number_of_ranks_alone(ranks):
    sizes = set()
    for seed in range(3):
        timeline = random_timeline(seed, ranks, 1 + 4 * seed)
        root = tree(plots.timeline_svg(timeline))
        sizes.add((root.get("width"), root.get("height")))
        assert f"rank {ranks - 1}" in [t.text for t in root.iter(f"{SVG}text")]
    assert len(sizes) == 1


def test_more_than_64_ranks_show_the_first_and_say_so():
    timeline = random_timeline(0, 70, 2)
    assert "first 64 of 70 ranks" in plots.timeline_svg(timeline) and "first 64 of 70 ranks" in plots.timeline_text(timeline)
    chosen = plots.timeline_svg(timeline, ranks=range(60, 70))
    assert "first" not in chosen and "rank 69" in chosen and "rank 59" not in chosen


def test_no_time_at_all_is_drawn_too():
    timeline = replay(Recording.from_logs([RankLog(0, 1)]), TOY)
    assert timeline.step_time == 0
    assert "step 0 s" in plots.timeline_svg(timeline) and "nothing in this recording takes time" in sentence(timeline)
    assert plots.timeline_text(timeline).count("|") == 2
    assert "0.000" in plots.breakdown_text(timeline)
    tree(breakdown_svg(timeline))
    plots.breakdown(timeline)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"width": 0}, "width in pixels is 0, but must be a whole number from 300"),
        ({"width": True}, "not True"),
        ({"width": 760.5}, "not 760.5"),
        ({"until": -1}, "end of the time axis, is -1"),
        ({"until": float("nan")}, "end of the time axis, is nan"),
        ({"until": "4"}, "not '4'"),
        ({"until": 1.0}, "this step takes 4.00 s: name a time that is not shorter"),
        ({"ranks": []}, "1 to 64 different whole numbers from 0 to 1"),
        ({"ranks": [0, 0]}, "different"),
        ({"ranks": [2]}, "from 0 to 1"),
        ({"ranks": [True]}, "whole numbers"),
        ({"ranks": 3}, "ranks is 3"),
        ({"ranks": ["a"]}, "whole numbers"),
    ],
)
def test_bad_options_are_explained(options, words):
    with pytest.raises((TypeError, ValueError), match=re.escape(words)):
        plots.timeline_svg(replay(two_ranks(), TOY), **options)


# ---- many spans -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed, spans", [(0, 1), (1, 50), (2, 5000)])
def test_merging_narrow_spans_keeps_every_kinds_time(seed, spans):
    rng = np.random.default_rng(seed)
    rank = np.sort(rng.integers(0, 3, spans))
    length = rng.exponential(0.5, spans)
    end = np.concatenate([np.cumsum(length[rank == r]) for r in range(3)])
    start, kind = end - length, rng.integers(0, 3, spans)
    x0, x1, at, parts = merged(start, end, kind, rank)
    for r in range(3):
        for k in range(3):
            assert (parts[at == r, k] * (x1 - x0)[at == r]).sum() == pytest.approx(
                length[(rank == r) & (kind == k)].sum(), abs=1e-9
            )
    narrow = parts.max(axis=1) < 0.999
    assert (x1 - x0)[narrow].max(initial=0) <= 2.0 + 0.8 + 1e-9
    assert len(x0) <= spans


def test_a_picture_of_200_000_spans_is_not_much_larger_than_one_of_2000():
    rng = np.random.default_rng(0)
    logs = [RankLog(r, 4) for r in range(4)]
    for log in logs:
        for _ in range(25_000):
            log.compute(flops=float(rng.integers(1, 1e9)))
            log.collective("all_reduce", 100)
    timeline = replay(Recording.from_logs(logs), TOY)
    assert len(timeline.columns["rank"]) >= 200_000
    begun = time.perf_counter()
    svg = plots.timeline_svg(timeline)
    print(f"{len(timeline.columns['rank']):,} spans: {len(svg):,} characters in {time.perf_counter() - begun:.3f} s (measured)")
    assert len(svg) < 200_000 and "narrow bars are drawn stacked" in svg
    tree(svg)


def test_mixed_cells_divide_the_height():
    """A thousand pairs of 30% compute and 70% communication: compute from the bottom, communication above it."""
    log = RankLog(0, 2), RankLog(1, 2)
    for each in log:
        for _ in range(3000):
            each.compute(flops=3e8)
            each.collective("all_reduce", 700)  # ring over two: 2 (n-1)/n = 1 times 0.7 s
    svg = plots.timeline_svg(replay(Recording.from_logs(log), TOY))
    compute = next(p for p in paths(svg, "mixed") if "compute" in p.get("class"))
    heights = [int(v) for v in re.findall(r"v-(\d+)", compute.get("d"))]
    assert np.mean(heights) == pytest.approx(0.3 * 200, rel=0.1)  # tenths of a pixel, bars of 20 pixels


# ---- text ---------------------------------------------------------------------------------------------------------------------


def test_text_timeline():
    assert plots.timeline_text(replay(two_ranks(), TOY), width=49).splitlines() == [
        "Replayed: step 4.00 s; communication is 25% of the step, waiting for other ranks 31%; "
        "the device, not the link, sets the pace.",
        "2 ranks on toy over toy link (1 kB/s)",
        "rank 0 |##########==========....................|",
        "rank 1 |#####.....==========####################|",
        "        0                                 4.00 s",
        "        # compute  = communication  . idle",
    ]


@pytest.mark.parametrize("ranks, events", [(1, 5), (3, 40), (8, 300)])
def test_text_rows_have_as_many_letters_of_a_kind_as_the_rank_spent_time_on_it(ranks, events):
    timeline = random_timeline(ranks, ranks, events)
    rows = re.findall(r"\|(.*)\|", plots.timeline_text(timeline, width=120))
    assert len(rows) == ranks
    for row, (_, *seconds) in zip(rows, timeline.breakdown()):
        for letter, expected in zip("#=.", seconds):
            assert row.count(letter) == pytest.approx(expected / timeline.step_time * len(row), abs=2)


@pytest.mark.parametrize("ranks, events", [(1, 5), (3, 40), (8, 300)])
def test_text_breakdown_sums_to_the_step(ranks, events):
    timeline = random_timeline(ranks, ranks, events)
    lines = plots.breakdown_text(timeline).splitlines()
    assert len(lines) == ranks + 4
    for text in lines[2:-1]:
        *parts, step = [float(v) for v in re.findall(r"\d+\.\d+", text)]
        assert len(parts) == 3 and sum(parts) == pytest.approx(step, abs=0.0016)


def test_text_curve_names_the_links_and_the_times():
    bandwidths = np.array([1.25e9, 31.5e9, 200e9, 450e9])
    assert plots.curve_text(bandwidths, 9e6 / bandwidths, kind="predicted").splitlines() == [
        "Predicted step time against bandwidth (per direction)",
        "bandwidth  step time  x shortest  link",
        "1.25 GB/s    7.20 ms         360  10 Gbit Ethernet",
        "31.5 GB/s     286 us        14.3  PCIe 4 x16",
        " 200 GB/s    45.0 us        2.25",
        " 450 GB/s    20.0 us        1.00  NVLink 4",
    ]


def test_text_curve_of_many_points_shows_the_ends_and_some_between():
    bandwidths = np.logspace(9, 12, 200)
    lines = plots.curve_text(bandwidths, {"ring": 1 / bandwidths, "tree": 2 / bandwidths}, most=5).splitlines()
    assert lines[1] == "ring:" and lines[8] == "tree:" and len(lines) == 15
    assert lines[3].split()[:2] == ["1", "GB/s"] and lines[7].split()[:2] == ["1,000", "GB/s"]


# ---- the sentence -------------------------------------------------------------------------------------------------------------


def test_sentence_says_what_sets_the_pace():
    recording = two_ranks(nbytes=1000)

    def at(bandwidth):
        return sentence(replay(recording, Cluster(SECOND, intra_node=Link(bandwidth, 0.0))))

    assert at(1000.0).endswith("; the device, not the link, sets the pace.")  # path: 1 s compute, 1 s link, 2 s compute
    assert at(1000.0 / 3).endswith("; device and link share the pace.")  # 3 s and 3 s
    assert at(100.0).endswith("; the link, not the device, sets the pace.")  # 10 s of 13
    assert at(100.0).startswith("Replayed: step 13.0 s; communication is 77% of the step, waiting for other ranks 10%;")
    log = RankLog(0, 1)
    log.compute(flops=1e9)
    alone = "Replayed: step 1.00 s; communication is 0% of the step; the device alone sets the pace."
    assert sentence(replay(Recording.from_logs([log]), TOY)) == alone


@pytest.mark.parametrize(
    "seconds, words",
    [(0, "0 s"), (1, "1.00 s"), (0.9996, "1.00 s"), (0.0123456, "12.3 ms"), (0.4504, "450 ms"), (1e-6, "1.00 us"),
     (999.4e-9, "999 ns"), (999.6e-9, "1.00 us"), (5e-10, "0.500 ns"), (1234.0, "1,234 s"), (3e-13, "0.0003 ns")],
)  # fmt: skip
def test_times_in_words(seconds, words):
    assert format_time(seconds) == words


def test_shares_in_words():
    assert [percent(s) for s in (0, 1e-4, 0.0049, 0.0051, 0.41, 1)] == ["0%", "under 1%", "under 1%", "1%", "41%", "100%"]


# ---- how a timeline shows itself ------------------------------------------------------------------------------------------------


def test_a_timeline_shows_itself():
    timeline = replay(two_ranks(), TOY)
    assert timeline._repr_svg_() == plots.timeline_svg(timeline) and timeline.text() == plots.timeline_text(timeline)
    picture = timeline.plot(width=500, until=10.0)
    assert picture._repr_svg_() == plots.timeline_svg(timeline, 500, 10.0) and repr(picture) == plots.timeline_text(timeline)
    html = picture._repr_html_()
    assert base64.b64decode(html.split("base64,")[1].split('"')[0]).decode() == picture.svg
    assert "max-width:100%" in html and plots.sentence(timeline) in html
    assert timeline._repr_html_() == timeline.plot()._repr_html_()


def test_an_unknown_picture_is_named():
    with pytest.raises(AttributeError, match="no 'pie'; it has: breakdown, .*curve"):
        plots.pie  # noqa: B018


def test_two_pictures_on_a_page_share_no_ids():
    assert "id=" not in plots.timeline_svg(replay(two_ranks(), TOY)) + curve_frame([1e9, 2e9], [2, 1]).svg()
