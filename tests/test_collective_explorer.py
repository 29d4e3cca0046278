"""The widget of lesson 02, driven from Python as the browser would: what it shows is what the closed forms give."""

import re

import pytest

from lessons_lib import compare_collectives
from lessons_lib.algorithms import algorithm, algorithms_of, crossing
from lessons_lib.explorers.collective_explorer import COLLECTIVES, RANKS, SIZES, plain
from lessons_lib.formulas import busbw
from lessons_lib.hardware import ETHERNET_10G, NVLINK4, PCIE4, Link
from lessons_lib.plots.collective_picture import HIGH, LOW, STYLES, Scene, across, busbw_svg, times_svg
from lessons_lib.plots.wording import format_time

RING, TREES = algorithm("all_reduce", "ring"), algorithm("all_reduce", "two trees in small parts")


def rows(widget) -> dict[str, list[str]]:
    """The table as shown: name -> cells."""
    found = re.findall(r"<tr>(<td.*?)</tr>", widget.picture.value)
    cells = [[re.sub("<[^>]*>", "", c).strip() for c in re.findall(r"<td.*?</td>", row)] for row in found]
    return {row[0]: row[1:] for row in cells}


def crossings(widget) -> list[tuple[str, str]]:
    return re.findall(r'<circle class="crossing" cx="([\d.]+)" cy="([\d.]+)"', widget.picture.value)


def test_it_opens_as_asked():
    w = compare_collectives(NVLINK4, 8, 10**6)
    assert (w.ranks.value, w.size.value, w.bandwidth.value, w.collective.value) == (8, 10**6, 450.0, "all_reduce")
    assert set(rows(w)) == {"naive", "binomial tree", "ring", "two trees in small parts"}
    assert rows(w)["ring"] == ["14", "1.75", "30.5 us", "32.8 GB/s", "57.4 GB/s", "13%"]
    assert w.sentence == "Predicted: two trees in small parts is the fastest here, 15.8 us; naive takes 3.64 times as long."
    assert "two trees in small parts up to 27.4 MB, ring above" in w.picture.value
    assert "n x latency x bandwidth = 6.8 MB" in w.picture.value


@pytest.mark.parametrize("ranks", [2, 3, 8, 12, 1024])
@pytest.mark.parametrize("size", [1000, 25 * 10**6, 10**10])
@pytest.mark.parametrize("link", [NVLINK4, ETHERNET_10G, Link(3e9, 0.0, "no latency")])
def test_every_number_is_the_closed_forms(ranks, size, link):
    w = compare_collectives(link, ranks, size)
    for box in w.boxes.values():
        box.value = True
    for collective in COLLECTIVES:
        w.collective.value = collective
        table = algorithms_of(collective)
        shown = rows(w)
        assert list(shown) == list(table)
        latency = w.latency.value * 1e-6 if link.latency else 0.0
        for name, (steps, volume, time, _, bus, _) in shown.items():
            seconds = table[name].time(w.size.value, ranks, link.bandwidth, latency)
            assert (steps, volume) == (f"{table[name].cost(ranks)[0]:,}", plain(table[name].cost(ranks)[1]))
            assert time == format_time(seconds)
            number, unit = bus.split()
            factor = {"GB/s": 1e9, "MB/s": 1e6, "kB/s": 1e3}[unit]
            assert float(number.replace(",", "")) * factor == pytest.approx(busbw(collective, size, ranks, seconds), rel=1e-3)
        best = min(table.values(), key=lambda a: a.time(w.size.value, ranks, link.bandwidth, latency))
        assert f"fastest here, {format_time(best.time(w.size.value, ranks, link.bandwidth, latency))}" in w.sentence


def test_the_ring_around_a_crossing_is_where_the_curves_cross():
    w = compare_collectives(NVLINK4, 8, 10**6)
    (x, y), *others = crossings(w)
    assert others == []
    size = crossing(RING, TREES, 8, NVLINK4.bandwidth, NVLINK4.latency)
    assert float(x) == pytest.approx(float(across(size, 440)), abs=0.06)
    w.boxes["all_reduce", "ring"].value = False
    assert crossings(w) == [] and "Of those shown, two trees in small parts is the fastest at every size" in w.picture.value


def test_sliders_move_everything():
    w = compare_collectives(NVLINK4, 8, 10**6)
    before = w.picture.value, w.sentence
    w.bandwidth.value = w.bandwidth.value / 10
    assert w.sentence != before[1] and w.scene.bandwidth == pytest.approx(45e9)
    w.latency.value = w.latency.value * 2
    assert w.scene.latency == pytest.approx(3.8e-6)
    w.ranks.value, w.size.value = 64, SIZES[-1]
    assert "64 ranks, 10.0 GB" in w.picture.value
    w.collective.value = "broadcast"
    assert list(rows(w)) == ["naive", "binomial tree", "chain in small parts"]


def test_the_browsers_last_digit_is_not_a_move():
    w = compare_collectives(PCIE4, 8, 10**6)
    before = w.picture.value
    w.bandwidth.value = w.bandwidth.value * (1 + 1e-15)
    assert w.picture.value == before and "PCIe 4 x16" in before


def test_at_least_one_algorithm_stays():
    w = compare_collectives(NVLINK4)
    for box in w.boxes.values():
        box.value = False
    assert list(rows(w)) == ["naive"]


def test_styles_tell_all_algorithms_apart():
    assert len(set(STYLES)) == len(STYLES) and len({colour for colour, _ in STYLES}) == len(STYLES)
    assert max(len(algorithms_of(c)) for c in COLLECTIVES) <= len(STYLES)


@pytest.mark.parametrize("nbytes", [LOW, HIGH])
def test_pictures_stay_in_their_frame(nbytes):
    for members in (2, 1024):
        scene = Scene({RING: STYLES[0], TREES: STYLES[1]}, members, 1e9, 1e-3, nbytes)
        for svg, width in ((times_svg(scene), 440), (busbw_svg(scene), 300)):
            points = [tuple(map(float, p.split(","))) for curve in re.findall(r'points="([^"]+)"', svg) for p in curve.split()]
            assert points and all(0 <= x <= width and 0 <= y <= 290 for x, y in points)
            assert 'role="img" aria-label="Predicted' in svg


def test_without_a_kernel_the_first_picture_and_the_words_stay(monkeypatch):
    import IPython.display

    shown = []
    monkeypatch.setattr(IPython.display, "display", lambda data, raw=False: shown.append(data))
    w = compare_collectives(NVLINK4)
    w.bandwidth.value = 1.0  # what is stored is what it opened on
    w._ipython_display_()
    static, live = shown
    assert static["text/html"].count("<img alt=") == 2 and "30.5 us" in static["text/plain"]
    assert "widget-view" in list(live)[0] and repr(w) == live["text/plain"]
    again = compare_collectives(NVLINK4)
    again._ipython_display_()
    assert shown[2] == static


@pytest.mark.parametrize(
    "call, told",
    [
        (lambda: compare_collectives(450e9), "The link must be a hardware.Link, .* not 450000000000.0"),
        (lambda: compare_collectives(None), "must be a hardware.Link"),
        (lambda: compare_collectives(NVLINK4, 1), "The number of ranks is 1, but must be a whole number from 2 to 1,024"),
        (lambda: compare_collectives(NVLINK4, True), "The number of ranks must be a whole number"),
        (lambda: compare_collectives(NVLINK4, 8.0), "not 8.0"),
        (lambda: compare_collectives(NVLINK4, 10**9), "The number of ranks is 1,000,000,000"),
        (lambda: compare_collectives(NVLINK4, 8, 0), "The size of the buffer is 0"),
        (lambda: compare_collectives(NVLINK4, 8, float("nan")), "The size of the buffer is nan"),
        (lambda: compare_collectives(NVLINK4, 8, 1e12), "from 1e3 to 1e10"),
        (lambda: compare_collectives(NVLINK4, 8, "1 MB"), "not '1 MB'"),
        (lambda: compare_collectives(NVLINK4, 8, 1e6, "gather"), "no picture for 'gather'; choose one of all_reduce, broadcast"),
        (lambda: compare_collectives(NVLINK4, 8, 1e6, None), "no picture for None"),
    ],
)
def test_wrong_input_is_named(call, told):
    with pytest.raises((ValueError, TypeError), match=told):
        call()


def test_numbers_are_written_plainly():
    assert [plain(v) for v in (1.75, 7.0, 1.9980468, 999.4, 1022.0, 2046)] == ["1.75", "7", "2", "999", "1,022", "2,046"]


def test_notches():
    assert RANKS[0] == 2 and list(RANKS) == sorted(set(RANKS)) and list(SIZES) == sorted(set(SIZES))
    assert (SIZES[0], SIZES[-1]) == (LOW, HIGH)
    assert compare_collectives(NVLINK4, 9, 1.1e6).ranks.value == 8 and compare_collectives(NVLINK4, 9, 1.1e6).size.value == 10**6
