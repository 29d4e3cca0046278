"""The bandwidth widget over several recordings, driven from Python as the browser would: all of it is what replay gives."""

import re
from dataclasses import replace as changed

import numpy as np
import pytest

from lessons_lib import plots
from lessons_lib.errors import Deadlock
from lessons_lib.explorers import choices as prices
from lessons_lib.explorers import explore
from lessons_lib.explorers import explorer as live
from lessons_lib.explorers.sliders import link_classes, notches_of
from lessons_lib.hardware import A100, H100, NVLINK4, Cluster, Device, Link
from lessons_lib.plots.choices_picture import Comparison, choices_frame, choices_svg
from lessons_lib.plots.curve_picture import place
from lessons_lib.plots.wording import format_time, totals
from lessons_lib.recording import RankLog, Recording
from lessons_lib.replay import replay

ONE_NODE, TWO_NODES = Cluster(H100), Cluster(A100, nodes=2, devices_per_node=4)


def bucketed(size, ranks=4, layers=12):
    """Backward over layers of uneven cost, an asynchronous all-reduce after every `size` of them, one wait at the end."""
    logs = [RankLog(r, ranks) for r in range(ranks)]
    for log in logs:
        handles = []
        for layer in range(layers):
            log.compute(flops=1e11 * (1 + layer % 3), nbytes=1e6, label=f"layer {layer}")
            if layer % size == size - 1:
                handles.append(log.collective("all_reduce", 10_000_000 * size, blocking=False))
        for handle in handles:
            log.wait(handle)
    return Recording.from_logs(logs)


def sliced(ranks, layers=4):
    """A layer's work divided over ranks, and an all-reduce after it."""
    logs = [RankLog(r, ranks) for r in range(ranks)]
    for log in logs:
        for _ in range(layers):
            log.compute(flops=4e12 / ranks, nbytes=1e6)
            if ranks > 1:
                log.collective("all_reduce", 50_000_000)
    return Recording.from_logs(logs)


BUCKETS = {f"{10 * s} MB": bucketed(s) for s in (1, 2, 3, 6, 12)}
RANKS = {str(n): sliced(n) for n in (1, 2, 4, 8)}


def assert_shows(explorer, shown, cluster):
    """Timeline, curve's point, bars, sentence: those of `shown` and of all choices, replayed on this cluster."""
    expected = {name: replay(recording, cluster) for name, recording in explorer.choices.items()}
    mine = expected[shown]
    assert explorer.error is None and explorer.recording is explorer.choices[shown]
    assert plots.timeline_svg(mine, 660) in explorer.picture.value
    assert explorer.sentence.startswith(plots.sentence(mine)) and explorer.sentence in explorer.picture.value
    assert f"{format_time(mine.step_time)}</text>" in explorer.picture.value.split('class="current"')[1]
    times = {name: timeline.step_time for name, timeline in expected.items()}
    assert bars(explorer) == {name: format_time(seconds) for name, seconds in times.items()}
    fastest = min(times.values())
    best = [name for name, seconds in times.items() if seconds <= fastest * (1 + 1e-9)]
    told = re.search(r"Best here: (.*?)(?: \(.*?\))?, ([\d.,]+ \w+)", explorer.sentence)
    assert told[1] in best and told[2] == format_time(fastest)
    if shown not in best and times[shown] / fastest > 1.01:
        ratio = re.search(rf"; {re.escape(shown)} takes ([\d.,]+) times as long\.", explorer.sentence)
        assert float(ratio[1].replace(",", "")) == pytest.approx(times[shown] / fastest, rel=0.006)


def bars(explorer):
    """The picture of all choices: name -> time."""
    svg = next(s for s in re.findall(r"<svg.*?</svg>", explorer.picture.value, re.S) if "Replayed step time by" in s)
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", svg)[1:]
    return {name: time.replace(" best", "") for name, time in zip(texts[::2], texts[1::2]) if name in explorer.choices}


def points(explorer, kind):
    return re.findall(rf'<polyline class="{kind}" points="([^"]*)"', explorer.picture.value)


def test_it_opens_with_the_first_choice():
    explorer = explore(BUCKETS, ONE_NODE, name="Bucket size")
    assert list(explorer.choices) == list(BUCKETS) and explorer.choice.options == tuple(BUCKETS)
    assert explorer.choice.value == "10 MB" and explorer.cluster == ONE_NODE
    assert_shows(explorer, "10 MB", ONE_NODE)
    assert "Bucket size 10 MB: 4 ranks on H100; inside a node NVLink 4 (450 GB/s)" in explorer.picture.value
    at = explorer.children.index(explorer.choice)
    assert explorer.children[at - 1].value == "Bucket size"  # its name as text beside it: the handle has none
    assert len(points(explorer, "curve")) == 1 and len(points(explorer, "choice")) == 4


@pytest.mark.parametrize("choices, name", [(BUCKETS, "Bucket size"), (RANKS, "Tensor parallel ranks")])
def test_every_move_shows_what_replay_gives_there(choices, name):
    explorer = explore(choices, TWO_NODES, name=name)
    rng = np.random.default_rng(4)
    for _ in range(25):
        move = rng.integers(4)
        if move == 0:
            explorer.choice.value = list(choices)[rng.integers(len(choices))]
        elif move == 1:
            explorer.bandwidth.value = float(rng.choice(notches_of(explorer.bandwidth)))
        elif move == 2:
            explorer.latency.value = float(10 ** rng.uniform(-1, 3))
        else:
            explorer.bandwidth.value = float(10 ** rng.uniform(0.1, 2.9))  # between notches, as a program may set it
        assert_shows(explorer, explorer.choice.value, explorer.cluster)
    explorer.device.value = H100
    assert_shows(explorer, explorer.choice.value, explorer.cluster)
    assert explorer.cluster.device is H100


def test_world_sizes_may_differ_and_both_links_are_there_if_any_choice_uses_them():
    explorer = explore(RANKS, TWO_NODES, name="Ranks")
    assert [o[1] for o in explorer.link.options] == ["intra_node", "inter_node"]
    sizes = set()
    for name in RANKS:
        explorer.choice.value = name
        assert_shows(explorer, name, TWO_NODES)
        assert explorer.timeline.world_size == int(name)
        sizes.add(tuple(re.findall(r'style="aspect-ratio:([\d/]+)"', explorer.picture.value)))
    assert len(sizes) == 1 and len(sizes.pop()) == 1  # the picture's room is that of the largest
    explorer.link.value = "inter_node"
    explorer.bandwidth.value = 2.0
    assert_shows(explorer, "8", changed(TWO_NODES, inter_node=explorer.cluster.inter_node))
    assert explorer.cluster.inter_node.bandwidth == 2e9 and "bandwidth across nodes" in explorer.picture.value
    assert link_classes([1, 2, 4], TWO_NODES) == ["intra_node"] and link_classes([1, 8], TWO_NODES) == ["intra_node", "inter_node"]


def test_the_curves_of_all_choices_are_those_of_replay():
    explorer = explore(RANKS, ONE_NODE, name="Ranks")
    explorer.choice.value = "4"
    lanes = 1e9 * notches_of(explorer.bandwidth)
    some = np.unique(np.append(np.arange(0, len(lanes), 3), len(lanes) - 1))
    frame = explorer._frame
    for name, drawn in zip(["4", "1", "2", "8"], [*points(explorer, "curve"), *points(explorer, "choice")]):
        times = [replay(RANKS[name], Cluster(H100, intra_node=Link(b, NVLINK4.latency))).step_time for b in lanes[some]]
        x, y = place(lanes[some], times, frame.x_range, frame.y_range, frame.width, frame.height)
        assert drawn == " ".join(f"{a:g},{b:g}" for a, b in zip(x, y))


def test_a_move_of_the_bandwidth_replays_once_and_never_sweeps_and_a_choice_neither(monkeypatch):
    calls = []
    sweep = prices.sweep
    monkeypatch.setattr(live, "replay", lambda *a: calls.append("replay") or replay(*a))
    monkeypatch.setattr(prices, "replay", lambda *a: calls.append("compute") or replay(*a))
    monkeypatch.setattr(prices, "sweep", lambda *a, **k: calls.append("sweep") or sweep(*a, **k))
    explorer = explore(RANKS, ONE_NODE)
    assert sorted(calls) == ["compute"] * 4 + ["replay"] + ["sweep"] * 4
    calls.clear()
    explorer.bandwidth.value = float(notches_of(explorer.bandwidth)[17])
    explorer.choice.value = "8"
    assert calls == ["replay", "replay"]
    explorer.latency.value = 60.0
    assert calls[2:] == ["sweep"] * 4 + ["replay"]


def test_a_move_of_the_choice_sends_one_message_to_the_browser(monkeypatch):
    explorer = explore(RANKS, ONE_NODE)
    sent = []
    for widget in (explorer.picture, explorer.bandwidth, explorer.latency, explorer.device, explorer.link, explorer):
        monkeypatch.setattr(widget, "send_state", lambda key=None, widget=widget: sent.append((widget, key)))
    explorer.choice.value = "2"
    assert sent == [(explorer.picture, "value")]


# ---- who is the best where ------------------------------------------------------------------------------------------------


TOY = Cluster(Device(1e12, 1e9, 1e30, efficiency=1.0, name="toy"), devices_per_node=4, intra_node=Link(1e9, 0.0))


def test_the_crossing_of_two_curves_is_where_their_times_are_equal():
    """One rank: 4 x 4 s. Two: 4 x (2 s + 50 MB / bandwidth, by 2(n-1)/n = 1). Equal at 25 MB/s."""
    explorer = explore({n: RANKS[n] for n in ("1", "2")}, changed(TOY, intra_node=Link(20e6, 0.0)), name="Ranks")
    assert explorer.sentence.endswith("Best here: 1 (ranks), 16.0 s; 2 takes 1.12 times as long.")
    ((begin, first), (crossing, second)) = explorer._comparison.stretches()
    assert (first, second) == (0, 1) and begin == pytest.approx(1e9 * 10**explorer.bandwidth.min)
    assert crossing == pytest.approx(25e6, rel=2e-3)  # between two notches: interpolated
    assert "The best by bandwidth inside a node: 1 up to 25" in explorer.picture.value
    explorer.bandwidth.value = 0.05
    assert explorer.sentence.endswith("Best here: 2 (ranks), 12.0 s; 1 takes 1.33 times as long.")
    ring = re.search(r'class="crossing" cx="([\d.]+)" cy="([\d.]+)"', explorer.picture.value)
    x, y = explorer._frame.place(25e6, 16.0)
    assert (float(ring[1]), float(ring[2])) == pytest.approx((x, y), abs=0.3)
    assert ">best: 2</text>" in explorer.picture.value


def comparison(times, shown=0, here=None, names=None, compute=None):
    times = np.array(times, dtype=float)
    here = times[:, 0] if here is None else np.array(here, dtype=float)
    names = names or tuple("abcdefghijklmnopqrstuvwxyz"[: len(times)])
    compute = here / 2 if compute is None else np.array(compute, dtype=float)
    return Comparison("Thing", names, shown, np.logspace(9, 11, times.shape[1]), times, here, compute)


@pytest.mark.parametrize("times, shown, words", [
    ([[2, 1], [3, 2]], 1, "Best here: a, 2.00 s; b takes 1.50 times as long."),
    ([[2, 1], [3, 2]], 0, "Best here: a, 2.00 s; b takes 1.50 times as long."),
    ([[2, 1], [3, 2], [4, 4]], 0, "Best here: a, 2.00 s; c takes 2.00 times as long."),
    ([[2, 1], [2, 1]], 1, "Best here: b, 2.00 s; every other choice takes about as long."),
    ([[2, 1], [2.004, 1], [8, 8]], 1, "Best here: a, 2.00 s; b takes about as long."),
    ([[0, 0], [3, 2]], 1, "Best here: a, 0 s."),
])  # fmt: skip
def test_the_finding_in_words(times, shown, words):
    assert comparison(times, shown).finding() == words


def test_the_best_by_bandwidth_in_words():
    assert comparison([[1, 1, 1], [2, 2, 2]]).turns("here") == "a is the best at every bandwidth here."
    found = comparison([[1, 2, 4], [2, 2, 2]])  # equal in the middle: no turn until one is really better
    assert [i for _, i in found.stretches()] == [0, 1] and found.stretches()[1][0] == pytest.approx(1e10)
    assert found.turns("here") == "The best by bandwidth here: a up to 10 GB/s, b above."
    many = comparison([[1, 2] * 5, [2, 1] * 5])
    assert many.turns("here") == "The best choice changes 9 times along the bandwidth here: see the foot of the curves."


def test_bars_have_the_lengths_of_the_times_and_their_parts():
    svg = choices_svg(comparison([[2, 1], [1, 1], [1.5, 1]], shown=2, compute=[0.5, 1.0, 0.0]))
    solid = [float(w) for w in re.findall(r'<rect x="[\d.]+" y="[\d.]+" width="([\d.]+)"', svg)][:-1]  # the last is the legend's
    striped = [float(b) - float(a) for a, b in re.findall(r'<path d="M([\d.]+) [\d.]+L([\d.]+) [\d.]+" stroke="#D55E00"', svg)][:-1]
    full = solid[0] + striped[0]
    assert solid == pytest.approx([full / 4, full / 2], abs=0.11) and striped == pytest.approx(
        [full * 3 / 4, full * 3 / 4], abs=0.11
    )
    assert "1.00 s best</text>" in svg and svg.count('class="shown"') == 1
    assert re.search(r'font-weight="bold">c</text>', svg)  # the one shown


def test_a_bar_many_times_the_shortest_is_cut_off_and_marked():
    svg = choices_svg(comparison([[1, 1], [100, 1]], compute=[1, 1]))
    assert svg.count('stroke="#fff" fill="none" stroke-width="3"') == 1 and "100 s</text>" in svg
    assert 'stroke="#fff" fill="none" stroke-width="3"' not in choices_svg(comparison([[1, 1], [3.9, 1]]))


def test_names_of_any_length_and_letters_stay_inside_the_pictures():
    names = ("x" * 200, "<b>&\"'", "größer 並列", " 7 ", *(f"n{i}" for i in range(20)))
    c = comparison(np.outer(np.arange(1, 25), [3, 2, 1]), names=names)
    import xml.etree.ElementTree as ElementTree

    for svg in (choices_svg(c), choices_frame(c).svg(2e9, 1.0)):
        root = ElementTree.fromstring(svg)
        assert "x" * 60 not in "".join(root.itertext()) and "<b>&\"'" in "".join(root.itertext())
    assert max(map(len, c.text().splitlines())) < 230


def test_times_of_nothing_have_pictures_too():
    log = RankLog(0, 1)
    log.compute(flops=0)
    empty = Recording.from_logs([log])
    explorer = explore({"a": empty, "b": empty}, TOY)
    assert explorer.sentence.endswith("Best here: a, 0 s.") and "<svg" in explorer.picture.value


# ---- what cannot be ---------------------------------------------------------------------------------------------------------


def deadlocked():
    logs = [RankLog(r, 2) for r in range(2)]
    for log in logs:
        log.recv(1 - log.rank, 8)
    return Recording.from_logs(logs)


@pytest.mark.parametrize("choices, name, words", [
    ({}, "Choice", "The dict given to explore is empty; allowed are 1 to 24"),
    ({str(i): RANKS["1"] for i in range(25)}, "Choice", "holds 25 recordings; allowed are 1 to 24"),
    ({4: RANKS["4"]}, "Choice", "A key of the dict given to explore is 4; allowed is a text that names the choice: '4'"),
    ({None: RANKS["4"]}, "Choice", "is None; allowed is a text"),
    ({" ": RANKS["4"]}, "Choice", "is ' '; allowed is a text that names the choice: '25 MB'"),
    ({"a": RANKS["4"], "b": None}, "Choice", "The choice 'b' is None; allowed is a Recording"),
    ({"a": RANKS["4"], "b": [RANKS["2"]]}, "Choice", "The choice 'b' is [Recording of 2 ranks"),
    ([RANKS["4"]], "Choice", "explore needs a Recording"),
    (RANKS, "", "name is ''; allowed is a text that says what the choices are"),
    (RANKS, None, "name is None"),
    (RANKS, 3, "name is 3"),
    (RANKS["4"], True, "name is True"),
    ({"a": RANKS["2"], "big": sliced(16)}, "Choice", "The choice 'big': This recording has 16 ranks, but the cluster only 8"),
])  # fmt: skip
def test_bad_input_is_refused_in_a_sentence(choices, name, words):
    with pytest.raises((TypeError, ValueError), match=re.escape(words)):
        explore(choices, ONE_NODE, name=name)


def test_one_bad_recording_among_good_ones_is_named():
    with pytest.raises(Deadlock, match="(?s)The choice 'stuck': .*wait for something that cannot come"):
        explore({"good": RANKS["2"], "stuck": deadlocked()}, ONE_NODE)
    with pytest.raises(TypeError, match="explore needs a Cluster, such as Cluster.H100., not None"):
        explore(RANKS, None)


def test_a_dict_of_one_has_no_slider_and_names_its_choice():
    explorer = explore({"25 MB": RANKS["4"]}, ONE_NODE, name="Bucket size")
    assert explorer.choice is None and explorer.recording is RANKS["4"]
    assert (
        explorer.sentence == plots.sentence(replay(RANKS["4"], ONE_NODE)) and "Bucket size 25 MB: 4 ranks" in explorer.picture.value
    )


def test_a_replay_that_fails_is_told_and_the_next_move_recovers(monkeypatch):
    explorer = explore(RANKS, ONE_NODE)
    explorer.choice.value = "4"

    def fail(*_, **__):
        raise ValueError("too hot")

    with monkeypatch.context() as broken:
        broken.setattr(prices, "sweep", fail)
        explorer.latency.value = 60.0
        assert explorer.sentence == "This cannot be replayed. ValueError: The choice '1': too hot"
        assert "visibility:hidden" in explorer.picture.value and explorer.timeline is None
    explorer.choice.value = "2"
    assert_shows(explorer, "2", explorer.cluster)


# ---- what is stored ---------------------------------------------------------------------------------------------------------


def test_a_cell_stores_pictures_and_findings(monkeypatch):
    import IPython.display

    explorer, outputs = explore(RANKS, ONE_NODE, name="Ranks"), []
    monkeypatch.setattr(IPython.display, "display", lambda data, raw: outputs.append(data))
    first = explorer.sentence
    explorer.choice.value = "8"
    explorer._ipython_display_()
    static, shown = outputs
    assert static["text/html"].count('src="data:image/svg+xml;base64,') == 3 and first in static["text/html"]
    lines = static["text/plain"].splitlines()
    assert lines[0] == first and lines[2] == "Ranks" and [line.split()[0] for line in lines[3:]] == list(RANKS)
    assert lines[3].endswith("shown") and lines[6].endswith("best")
    assert shown["text/plain"] == "Explorer of 4 recordings of 1 to 8 ranks; its sliders appear where a kernel runs"


def test_computing_is_the_mean_over_ranks_and_waiting_the_rest():
    explorer = explore(RANKS, ONE_NODE)
    for seconds, recording in zip(explorer._comparison.compute, RANKS.values()):
        assert seconds == totals(replay(recording, ONE_NODE))[:, 0].mean()


def test_it_starts_where_it_is_told():
    explorer = explore(RANKS, ONE_NODE, name="Ranks", start="4")
    assert explorer.choice.value == "4"
    assert_shows(explorer, "4", ONE_NODE)
    for wrong in ("3", 4, "", ["4"], True):
        with pytest.raises(ValueError, match=r"start is .*; allowed is one of the choices: '1', '2', '4', '8'\."):
            explore(RANKS, ONE_NODE, start=wrong)
