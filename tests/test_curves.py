"""Axes, step time against bandwidth and breakdown bars, against geometry worked out by hand."""

import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from lessons_lib import plots
from lessons_lib.hardware import LINKS, Cluster, Device, Link
from lessons_lib.plots.curve_picture import LEFT, breakdown_svg, curve_frame, nearest_link, time_range
from lessons_lib.plots.svg import clean, log_ticks, marks, round_up, text_width, ticks
from lessons_lib.recording import RankLog, Recording
from lessons_lib.replay import replay

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


# ---- axes ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [*10 ** np.random.default_rng(0).uniform(-12, 6, 50), 1.0, 1e-6, 2.0, 1e-9])
def test_axes_end_at_the_next_round_number_and_have_round_ticks(value):
    end = round_up(value)
    assert value * (1 - 1e-8) <= end <= value * 1.34 * (1 + 1e-9)
    at = ticks(end)
    assert 3 <= len(at) <= 9 and at[0] == 0 and at[-1] <= end * (1 + 1e-9)
    step = f"{at[1]:.6e}"
    assert step[0] in "125" and float(step.split("e")[0]) in (1, 2, 5)
    assert np.allclose(np.diff(at), at[1])


def test_logarithmic_ticks():
    assert log_ticks(1, 100).tolist() == pytest.approx([1, 2, 5, 10, 20, 50, 100])
    assert log_ticks(1, 1000, most=7).tolist() == pytest.approx([1, 3, 10, 30, 100, 300, 1000])
    assert log_ticks(1, 1e9, most=4).tolist() == pytest.approx([1, 1e3, 1e6, 1e9])
    assert time_range(np.array([0.0123, 0.4])) == pytest.approx((0.01, 0.5))
    assert time_range(np.array([0.01, 0.01])) == pytest.approx((0.01, 0.02))
    assert time_range(np.array([0.0])) == (1e-9, 1e-8)


def test_names_on_an_axis_never_touch_and_the_most_important_come_first():
    rng = np.random.default_rng(1)
    for count in (1, 5, 40):
        named = [(float(x), f"link {i}") for i, x in enumerate(rng.uniform(0, 400, count))]
        placed = marks(named, 10, 0, 400, rows=2)
        assert placed[0][3] == "link 0"
        for row in (0, 1):
            spans = sorted((m - text_width(n, 10) / 2, m + text_width(n, 10) / 2) for _, m, r, n in placed if r == row)
            assert all(a[1] < b[0] for a, b in zip(spans, spans[1:])) and all(0 <= a and b <= 400 for a, b in spans)


def test_texts_are_cleaned_for_xml():
    assert clean('a < b & "c"\n d\x00') == "a &lt; b &amp; &quot;c&quot; d?"


# ---- the curve and the bars -----------------------------------------------------------------------------------------------------


def test_the_curve_is_straight_where_time_is_bytes_over_bandwidth_and_the_point_lies_on_it():
    bandwidths = np.array([1e9, 1e10, 1e11, 1e12])
    frame = curve_frame(bandwidths, 1e9 / bandwidths)  # 1 s down to 1 ms
    assert frame.x_range == (1e9, 1e12) and frame.y_range == pytest.approx((1e-3, 1.0))
    line = next(p for p in tree(frame.svg()).iter(f"{SVG}polyline"))
    points = [tuple(map(float, p.split(","))) for p in line.get("points").split()]
    xs, ys = zip(*points)
    assert (
        xs[0] == LEFT
        and np.allclose(np.diff(xs), np.diff(xs)[0], atol=0.11)
        and np.allclose(np.diff(ys), np.diff(ys)[0], atol=0.11)
    )
    root = tree(frame.svg(1e10, 0.1))
    dot = next(c for c in root.iter(f"{SVG}circle"))
    assert (float(dot.get("cx")), float(dot.get("cy"))) == points[1]
    assert "10 GB/s: 100 ms" in [t.text for t in root.iter(f"{SVG}text")] and "Now 10 GB/s: 100 ms." in root.get("aria-label")
    assert not list(tree(frame.svg()).iter(f"{SVG}circle"))


def test_the_curve_marks_the_real_links_in_its_range_and_no_others():
    bandwidths = np.logspace(np.log10(20e9), np.log10(500e9), 20)
    svg = curve_frame(bandwidths, 1 / bandwidths).svg()
    names = {t.text for g in tree(svg) if g.get("class") == "links" for t in g}
    inside = {link.name for link in LINKS if 20e9 <= link.bandwidth <= 500e9}
    assert {"PCIe 4 x16", "InfiniBand NDR", "NVLink 4"} <= names <= inside
    assert svg.count('stroke-dasharray="1 3"') == len(inside)


def test_a_point_outside_the_curve_is_held_at_its_edge():
    frame = curve_frame([1e9, 1e12], [1.0, 1e-3])
    assert frame.place(1e6, 1e9) == (LEFT, 62)


def test_nearest_link():
    assert nearest_link(450e9).name == "NVLink 4" and nearest_link(440e9).name == "NVLink 4"
    assert nearest_link(200e9) is None


@pytest.mark.parametrize(
    "bandwidths, times, words",
    [
        ([], [], "two or more different, positive"),
        ([1e9], [1.0], "two or more"),
        ([1e9, 1e9], [1.0, 1.0], "two or more different"),
        ([0, 1e9], [1.0, 1.0], "positive"),
        ([-1e9, 1e9], [1.0, 1.0], "positive"),
        ([1e9, np.nan], [1.0, 1.0], "finite"),
        ([1e9, np.inf], [1.0, 1.0], "finite"),
        ([True, False], [1.0, 1.0], "Bandwidths must be"),
        ("fast", [1.0, 1.0], "'fast'"),
        (None, [1.0, 1.0], "None"),
        ([[1e9, 2e9]], [1.0, 1.0], "Bandwidths must be"),
        ([1e9, 2e9], [1.0], "2 finite numbers of seconds"),
        ([1e9, 2e9], [1.0, -1.0], "0 or more"),
        ([1e9, 2e9], [1.0, np.nan], "finite"),
        ([1e9, 2e9], {}, "0 curves"),
        ([1e9, 2e9], {str(i): [1, 1] for i in range(6)}, "6 curves; a figure holds 1 to 5"),
        ([1e9, 2e9], {"ring": [1.0, None]}, "Step times of 'ring'"),
    ],
)
@pytest.mark.parametrize("draw", [plots.curve, plots.curve_text])
def test_curves_that_cannot_be_drawn_are_explained(draw, bandwidths, times, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        draw(bandwidths, times)


def test_figures_show_themselves_once_and_leave_nothing_in_pyplot():
    import matplotlib.pyplot

    bandwidths = np.logspace(9, 12, 20)
    figure = plots.curve(bandwidths, {"ring": 1 / bandwidths, "tree": 2 / bandwidths}, current=31.5e9, title="Two ways")
    bars = plots.breakdown(replay(two_ranks(), TOY))
    assert matplotlib.pyplot.get_fignums() == []
    for made, text in ((figure, plots.curve_text(bandwidths, {"ring": 1 / bandwidths, "tree": 2 / bandwidths})),
                       (bars, plots.breakdown_text(replay(two_ranks(), TOY)))):  # fmt: skip
        data, metadata = made._repr_mimebundle_()
        assert set(data) == {"image/png", "text/plain"} and data["text/plain"] == repr(made) == text
        assert data["image/png"].startswith("iVBORw0KGgo") and metadata["image/png"]["width"] == 760


def test_the_figure_has_the_lines_the_points_and_the_links():
    bandwidths = np.logspace(9, 12, 20)
    axes = plots.curve(bandwidths, {"ring": 1e6 / bandwidths, "tree": 2e6 / bandwidths}, current=31.5e9).axes[0]
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert lines["ring"].get_linestyle() != lines["tree"].get_linestyle()
    assert np.array_equal(lines["tree"].get_ydata(), 2e6 / bandwidths)
    verticals = {
        line.get_xdata()[0] for line in axes.get_lines() if line.get_linestyle() == ":" and len(set(line.get_xdata())) == 1
    }
    assert {link.bandwidth for link in LINKS} == verticals
    dots = [line for line in axes.get_lines() if line.get_marker() == "o"]
    assert [dot.get_xdata()[0] for dot in dots] == [31.5e9] * 2


def test_breakdown_bars_have_the_lengths_of_the_breakdown():
    timeline = random_timeline(5, 3, 20)
    axes = plots.breakdown(timeline).axes[0]
    unit = {"s": 1.0, "ms": 1e-3}[axes.get_xlabel().split()[-1]]
    widths = np.array([bar.get_width() for bar in axes.patches]).reshape(3, 3).T * unit
    assert np.allclose(widths, [row[1:] for row in timeline.breakdown()])
    assert len({bar.get_hatch() for bar in axes.patches}) == 3
    svg = breakdown_svg(timeline)
    boxes = [float(r.get("width")) for r in list(tree(svg).iter(f"{SVG}rect"))[1:]]
    assert boxes == pytest.approx([row[1] / timeline.step_time * (310 - 58 - 18) for row in timeline.breakdown()], abs=0.06)


@pytest.mark.parametrize("ranks", [1, 6, 64])
def test_breakdown_picture_keeps_its_size(ranks):
    root = tree(breakdown_svg(random_timeline(0, min(ranks, 8), 3) if ranks < 64 else _wide(64)))
    assert (root.get("width"), root.get("height")) == ("310", "280")
    assert all(float(t.get("y")) <= 280 for t in root.iter(f"{SVG}text"))


def _wide(ranks):
    logs = [RankLog(r, ranks) for r in range(ranks)]
    for log in logs:
        log.compute(flops=1e9)
    return replay(Recording.from_logs(logs), Cluster(SECOND, devices_per_node=ranks))
