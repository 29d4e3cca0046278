"""The bandwidth widget, driven from Python as the browser would drive it: what it shows is what replay gives."""

import math
import re
from dataclasses import replace as changed

import pytest

from lessons_lib import plots
from lessons_lib.errors import Deadlock
from lessons_lib.explorers import Explorer, explore
from lessons_lib.explorers import choices as prices
from lessons_lib.explorers import explorer as live
from lessons_lib.explorers.sliders import device_options, link_classes, marks_html, named_link, notches, slider_range
from lessons_lib.hardware import A100, DEVICES, H100, IB_NDR, LINKS, NVLINK4, Cluster, Device, Link
from lessons_lib.recording import RankLog, Recording
from lessons_lib.replay import replay


def reduced(ranks=4, layers=3):
    """Compute and an all-reduce, a few times."""
    logs = [RankLog(r, ranks) for r in range(ranks)]
    for log in logs:
        for layer in range(layers):
            log.compute(flops=1e12 * (1 + log.rank), nbytes=1e6, label=f"layer {layer}")
            log.collective("all_reduce", 50_000_000)
    return Recording.from_logs(logs)


ONE_NODE, TWO_NODES = Cluster(H100), Cluster(A100, nodes=2, devices_per_node=2)


def shown(explorer):
    """The timeline's SVG in the HTML that the browser gets."""
    return re.search(r'<div class="fitted"[^>]*>(<svg.*?</svg>)</div>', explorer.picture.value, re.S).group(1)


def assert_shows(explorer, cluster):
    """Everything visible is what `replay` gives on this cluster."""
    expected = replay(explorer.recording, cluster)
    assert explorer.timeline.step_time == expected.step_time and explorer.timeline.title == expected.title
    assert {k: v.tolist() for k, v in explorer.timeline.columns.items()} == {k: v.tolist() for k, v in expected.columns.items()}
    assert explorer.sentence == plots.sentence(expected) and explorer.sentence in explorer.picture.value
    assert shown(explorer) == plots.timeline_svg(expected, 660)
    assert plots.breakdown_svg(expected) in explorer.picture.value
    words = f"{plots.format_time(expected.step_time)}</text>"
    assert words in explorer.picture.value.split('class="current"')[1]
    assert explorer.error is None


# ---- explore ----------------------------------------------------------------------------------------------------------------


def test_it_opens_on_the_cluster_as_given():
    explorer = explore(reduced(), ONE_NODE)
    assert isinstance(explorer, Explorer) and explorer.bandwidth.value == 450.0 and explorer.latency.value == pytest.approx(1.9)
    assert explorer.device.value is H100 and explorer.cluster == ONE_NODE
    assert_shows(explorer, ONE_NODE)
    assert "4 ranks on H100; inside a node NVLink 4 (450 GB/s), latency 1.90 us." in explorer.picture.value


@pytest.mark.parametrize("bandwidth", [1.25, 12.5, 31.6227766, 100.0, 500.0, 899.0])
def test_moving_the_bandwidth_shows_what_replay_gives_there(bandwidth):
    explorer = explore(reduced(), ONE_NODE)
    before = explorer.picture.value
    explorer.bandwidth.value = bandwidth
    now = explorer.cluster.intra_node
    assert now.bandwidth == pytest.approx(bandwidth * 1e9) and now.latency == NVLINK4.latency
    assert_shows(explorer, changed(ONE_NODE, intra_node=now))
    assert explorer.picture.value != before


def test_moving_latency_and_device_moves_curve_and_timeline():
    explorer = explore(reduced(), ONE_NODE)

    def line():
        return re.search(r'<polyline class="curve" points="([^"]*)"', explorer.picture.value).group(1)

    first = line()
    explorer.bandwidth.value = 100.0
    assert line() == first  # the point moves, the curve stays
    explorer.latency.value = 500.0
    second = line()
    assert second != first
    explorer.device.value = A100
    assert line() != second
    assert_shows(explorer, Cluster(A100, intra_node=explorer.cluster.intra_node))
    assert explorer.cluster.intra_node.latency == pytest.approx(500e-6) and explorer.cluster.intra_node.bandwidth == 100e9


def test_picture_keeps_its_size_while_values_change():
    explorer, sizes = explore(reduced(8, 5), ONE_NODE), set()
    for bandwidth in (1.0, 20.0, 300.0, 950.0):
        for device in (DEVICES[0], H100):
            explorer.bandwidth.value, explorer.device.value = bandwidth, device
            sizes.add(tuple(re.findall(r'<svg [^>]*width="(\d+)" height="(\d+)"', explorer.picture.value)))
    assert len(sizes) == 1 and len(sizes.pop()) == 3


def test_a_move_sends_one_message_to_the_browser(monkeypatch):
    explorer = explore(reduced(), ONE_NODE)
    sent = []
    for widget in (explorer.picture, explorer.latency, explorer.device, explorer.link, explorer):
        monkeypatch.setattr(widget, "send_state", lambda key=None, widget=widget: sent.append((widget, key)))
    explorer.bandwidth.value = 60.0
    assert sent == [(explorer.picture, "value")]


def test_a_move_of_the_bandwidth_replays_once_and_never_sweeps(monkeypatch):
    calls = []
    monkeypatch.setattr(live, "replay", lambda *a: calls.append("replay") or replay(*a))
    sweep = prices.sweep
    monkeypatch.setattr(prices, "sweep", lambda *a, **k: calls.append("sweep") or sweep(*a, **k))
    explorer = explore(reduced(), ONE_NODE)
    calls.clear()
    explorer.bandwidth.value = 60.0
    assert calls == ["replay"]
    explorer.latency.value = 60.0
    assert calls == ["replay", "sweep", "replay"]


def test_the_browsers_last_digit_is_no_move():
    explorer = explore(reduced(), ONE_NODE)
    explorer.bandwidth.value = 450.0 * (1 - 1e-15)
    assert explorer.cluster is ONE_NODE
    explorer.bandwidth.value = 500.0
    explorer.bandwidth.value = 450.0 * (1 + 1e-15)
    assert explorer.cluster.intra_node is NVLINK4  # and coming back finds the link with its name


@pytest.mark.parametrize("value", [1.25, 50.0, 450.0, 900.0, 3.7])
@pytest.mark.parametrize("step", [0.02, 0.05])
def test_the_first_value_lies_on_a_notch(value, step):
    """The browser would move it to the nearest notch otherwise, and report that as a move."""
    low, high = notches(value, 0, 3, step)
    assert 0 <= low < step and 3 - step < high <= 3
    for exponent in (math.log10(value), high):
        assert (exponent - low) / step == pytest.approx(round((exponent - low) / step), abs=1e-6)


def test_two_nodes_offer_both_links_each_with_sliders_of_its_own():
    explorer = explore(reduced(), TWO_NODES)
    assert [option[1] for option in explorer.link.options] == ["intra_node", "inter_node"]
    inside = explorer.bandwidth
    inside.value = 200.0
    explorer.link.value = "inter_node"
    assert explorer.bandwidth is not inside and explorer.bandwidth.value == 50.0 and explorer.latency.value == pytest.approx(4.0)
    assert explorer.cluster.inter_node is IB_NDR and explorer.cluster.intra_node.bandwidth == 200e9
    assert "bandwidth across nodes, GB/s per direction" in explorer.picture.value
    explorer.bandwidth.value = 5.0
    assert explorer.cluster.inter_node.bandwidth == 5e9 and explorer.cluster.intra_node.bandwidth == 200e9
    assert_shows(explorer, explorer.cluster)
    visible = [box.layout.display for box in explorer.children if hasattr(box, "children") and inside in box.children]
    assert visible == ["none"]


@pytest.mark.parametrize(
    "ranks, cluster, expected",
    [
        (1, Cluster(H100), ["intra_node"]),
        (4, Cluster(H100), ["intra_node"]),
        (8, Cluster(H100, nodes=4), ["intra_node"]),
        (9, Cluster(H100, nodes=4), ["intra_node", "inter_node"]),
        (4, Cluster(H100, nodes=4, devices_per_node=1), ["inter_node"]),
        (1, Cluster(H100, nodes=4, devices_per_node=1), ["intra_node"]),
    ],
)
def test_only_links_that_are_used_are_offered(ranks, cluster, expected):
    assert link_classes([ranks], cluster) == expected


def test_a_link_of_your_own_beyond_the_usual_range_and_a_device_of_your_own():
    device = Device(1e12, 1e9, 1e11)
    explorer = explore(reduced(), Cluster(device, intra_node=Link(3e6, 0.02, "radio")))
    assert explorer.bandwidth.value == pytest.approx(0.003) and explorer.bandwidth.min <= math.log10(0.003)
    assert explorer.latency.value == pytest.approx(20_000) and explorer.device.value == device
    assert "a device of your own" in explorer.picture.value and "radio (3 MB/s)" in explorer.picture.value
    explorer.bandwidth.value = 1.0
    explorer.bandwidth.value = 0.003
    assert explorer.cluster.intra_node.name == "radio"


def test_a_link_without_latency_stays_without_until_its_slider_moves():
    explorer = explore(reduced(), Cluster(H100, intra_node=Link(450e9, 0.0)))
    explorer.bandwidth.value = 100.0
    assert explorer.cluster.intra_node.latency == 0.0
    explorer.latency.value = 10.0
    assert explorer.cluster.intra_node.latency == pytest.approx(1e-5)


def test_one_rank_has_a_picture_too():
    log = RankLog(0, 1)
    log.compute(flops=1e12)
    assert "the device alone sets the pace" in explore(Recording.from_logs([log]), ONE_NODE).sentence


def test_a_replay_that_fails_is_told_in_the_widget_and_the_next_move_recovers(monkeypatch):
    explorer = explore(reduced(), ONE_NODE)

    def fail(*_):
        raise ValueError("the link <melted>")

    monkeypatch.setattr(live, "replay", fail)
    explorer.bandwidth.value = 60.0
    assert isinstance(explorer.error, ValueError) and explorer.timeline is None
    assert explorer.sentence == "This cannot be replayed. ValueError: the link <melted>"
    assert "the link &lt;melted&gt;" in explorer.picture.value and "visibility:hidden" in explorer.picture.value
    monkeypatch.setattr(live, "replay", replay)
    explorer.bandwidth.value = 70.0
    assert_shows(explorer, explorer.cluster)
    assert "visibility:hidden" not in explorer.picture.value


@pytest.mark.parametrize("recording, cluster, words", [
    (None, ONE_NODE, "explore needs a Recording, which run(...) returns or Recording.load(path) reads, not None"),
    ("run", ONE_NODE, "not 'run'"),
    (reduced(), None, "explore needs a Cluster, such as Cluster(H100), not None"),
    (reduced(), H100, "explore needs a Cluster"),
    (reduced(8), Cluster(H100, devices_per_node=4), "8 ranks, but the cluster only 4 devices"),
])  # fmt: skip
def test_what_cannot_be_explored_is_said_at_once(recording, cluster, words):
    with pytest.raises((TypeError, ValueError), match=re.escape(words)):
        explore(recording, cluster)


def test_a_recording_that_deadlocks_is_explained():
    logs = [RankLog(r, 2) for r in range(2)]
    for log in logs:
        log.recv(1 - log.rank, 8)
    with pytest.raises(Deadlock, match="wait for something that cannot come"):
        explore(Recording.from_logs(logs), ONE_NODE)


# ---- the controls -----------------------------------------------------------------------------------------------------------


def test_sliders_are_logarithmic_and_name_and_unit_are_text_beside_them():
    explorer = explore(reduced(), ONE_NODE)
    assert explorer.bandwidth.base == 10 and explorer.bandwidth.readout and explorer.bandwidth.continuous_update
    box = next(c for c in explorer.children if explorer.bandwidth in getattr(c, "children", ()))
    texts = [c.value for c in box.children]
    assert texts[0] == "Bandwidth of the link inside a node, in GB/s per direction"
    assert "Latency of the link inside a node, in us per message" in texts
    assert explorer.children[0].children[0].value == "Device"


def test_marks_under_the_slider_lie_where_the_links_are():
    html = marks_html(0.0, 3.0)
    ticks = sorted(float(v) for v in re.findall(r"height:5px[^\"]*left:([\d.]+)%", html))
    assert ticks == pytest.approx(sorted(100 * math.log10(link.bandwidth / 1e9) / 3 for link in LINKS), abs=0.01)
    for name in ("10 Gbit Ethernet", "PCIe 4 x16", "InfiniBand NDR", "NVLink 4"):
        assert f">{name}</span>" in html
    assert "NVLink 4" not in marks_html(0.0, 2.0)


def test_ranges_hold_every_value():
    assert slider_range([450.0, 50.0], 0, 3) == (0, 3)
    assert slider_range([0.003, 20_000], 0, 3) == (-3, 5)
    assert slider_range([0.0, 1.0], -1, 3) == (-1, 3)
    assert slider_range([1000.0], 0, 3) == (0, 3)


def test_links_keep_their_names_only_where_they_are_meant():
    assert named_link(450e9 * (1 + 1e-12), 1.9e-6) is NVLINK4
    assert named_link(450e9, 5e-6).name == "a link like NVLink 4" and named_link(200e9, 1e-6).name == ""


def test_devices_of_the_catalogue_and_your_own():
    assert [d for _, d in device_options(H100)] == list(DEVICES)
    own = Device(1e12, 1e9, 1e11, name="mine")
    assert device_options(own)[0] == ("mine", own) and len(device_options(own)) == len(DEVICES) + 1


# ---- what is stored -------------------------------------------------------------------------------------------------------------


def displayed(widget, monkeypatch):
    """The outputs that a cell with this widget stores, as (data, ...)."""
    import IPython.display

    outputs = []
    monkeypatch.setattr(IPython.display, "display", lambda data, raw: outputs.append(data))
    widget._ipython_display_()
    return outputs


def test_a_cell_stores_the_picture_and_the_finding_beside_the_live_widget(monkeypatch):
    explorer = explore(reduced(), ONE_NODE)
    static, live = displayed(explorer, monkeypatch)
    assert set(static) == {"text/html", "text/plain"}
    assert static["text/plain"] == f"{explorer.sentence}\n4 ranks on H100; inside a node NVLink 4 (450 GB/s), latency 1.90 us."
    assert static["text/html"].count('src="data:image/svg+xml;base64,') == 3 and explorer.sentence in static["text/html"]
    assert "<svg" not in static["text/html"] and "<script" not in static["text/html"]  # what is not trusted would lose it
    assert live["application/vnd.jupyter.widget-view+json"]["model_id"] == explorer.model_id
    assert live["text/plain"] == repr(explorer) == "Explorer of 4 ranks; its sliders appear where a kernel runs"
    key = re.search(r'<div class="static-(\w+)"', static["text/html"]).group(1)
    assert f".static-{key}{{display:none}}" in explorer.picture.value


def test_what_is_stored_does_not_change_from_run_to_run_nor_with_the_sliders(monkeypatch):
    first, second = explore(reduced(), ONE_NODE), explore(reduced(), ONE_NODE)
    second.bandwidth.value = 20.0
    (a, _), (b, _) = displayed(first, monkeypatch), displayed(second, monkeypatch)
    assert a == b
    other, _ = displayed(explore(reduced(), Cluster(A100)), monkeypatch)
    assert other["text/html"] != a["text/html"]
