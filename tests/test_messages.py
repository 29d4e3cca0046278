"""The two constants of a link: predicted times by hand, and fits that give back the link that made the times."""

import math

import numpy as np
import pytest

from lessons_lib.hardware import ETHERNET_100G, NVLINK4, Link
from lessons_lib.messages import fit_link, half_size, message_time

SLOW = Link(1e9, 1e-3, "slow")


def test_a_message_takes_latency_plus_bytes_over_bandwidth():
    assert message_time(8_000_000, SLOW) == pytest.approx(9e-3, rel=1e-12)
    assert message_time(0, SLOW) == 1e-3
    assert message_time(1e9, ETHERNET_100G) == pytest.approx(0.080014, rel=1e-12)  # 100 Gbit/s are 12.5 GB/s, 14 us come on top
    assert message_time([0, 1_000_000], SLOW).tolist() == pytest.approx([1e-3, 2e-3], rel=1e-12)


def test_at_half_size_both_terms_are_equal_and_half_of_the_bandwidth_is_reached():
    for link in (SLOW, NVLINK4, ETHERNET_100G):
        size = half_size(link)
        assert message_time(size, link) == pytest.approx(2 * link.latency, rel=1e-12)
        assert size / message_time(size, link) == pytest.approx(link.bandwidth / 2, rel=1e-12)
    assert half_size(NVLINK4) == pytest.approx(855_000, rel=1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_exact_times_of_any_link_give_that_link_back(seed):
    rng = np.random.default_rng(seed)
    link = Link(10 ** rng.uniform(6, 12), 10 ** rng.uniform(-7, -3))
    sizes = half_size(link) * 10 ** rng.uniform(-4, 4, rng.integers(3, 12))
    found = fit_link(sizes, [link.latency + n / link.bandwidth for n in sizes], "fitted")
    assert found.name == "fitted"
    assert (found.bandwidth, found.latency) == pytest.approx((link.bandwidth, link.latency), rel=1e-6)


@pytest.mark.parametrize("seed", range(20))
def test_noisy_times_are_fitted_no_worse_by_any_link_nearby(seed):
    rng = np.random.default_rng(100 + seed)
    sizes = 10.0 ** np.arange(0, 8)
    times = (50e-6 + sizes / 3e9) * rng.uniform(0.8, 1.3, len(sizes))
    found = fit_link(sizes, times)

    def error(latency, bandwidth):
        return sum(((latency + n / bandwidth) / t - 1) ** 2 for n, t in zip(sizes, times))

    best = error(found.latency, found.bandwidth)
    for up, down in [(1.01, 1), (0.99, 1), (1, 1.01), (1, 0.99), (1.01, 0.99), (0.99, 1.01)]:
        assert error(found.latency * up, found.bandwidth * down) >= best
    assert 25e-6 < found.latency < 100e-6 and 1.5e9 < found.bandwidth < 6e9


def test_an_error_of_a_share_weighs_the_same_at_every_size():
    sizes = np.array([1e3, 1e8])  # two unknowns, two times: exact, although the times differ by a factor of 20,000
    found = fit_link(np.repeat(sizes, 2), [0.9 * 1e-5, 1.1 * 1e-5, 0.9 * 0.1, 1.1 * 0.1])
    middle = 1 / np.mean([1 / 0.9, 1 / 1.1]) * np.mean([1 / 0.9, 1 / 1.1]) ** 2 / np.mean([1 / 0.81, 1 / 1.21])
    assert message_time(sizes, found).tolist() == pytest.approx([middle * 1e-5, middle * 0.1], rel=1e-9)


def test_a_latency_below_zero_becomes_zero():
    found = fit_link([1e6, 2e6, 3e6], [0.9e-3, 2e-3, 3.1e-3])
    assert found.latency == 0.0
    ratios = np.array([1e6 / 0.9e-3, 2e6 / 2e-3, 3e6 / 3.1e-3])
    assert found.bandwidth == pytest.approx((ratios**2).sum() / ratios.sum(), rel=1e-12)


@pytest.mark.parametrize(
    "sizes, times, said",
    [
        ([1e3], [1e-3], "at least two sizes"),
        ([1e3, 1e3], [1e-3, 2e-3], "at least two sizes"),
        ([1e3, 1e6], [1e-3], "2 sizes and 1 times"),
        ([1e3, 1e6], [1e-3, 1e-9], "do not grow"),
        ([1e3, -1.0], [1e-3, 1e-3], "-1.0"),
        ([1e3, 1e6], [1e-3, 0.0], "0.0"),
        ([1e3, math.inf], [1e-3, 1e-3], "inf"),
        ([1e3, 1e6], [1e-3, math.nan], "nan"),
    ],
)
def test_what_cannot_be_fitted_is_explained(sizes, times, said):
    with pytest.raises(ValueError, match=said):
        fit_link(sizes, times)


@pytest.mark.parametrize("bad", [None, "1e6", True, [], [True], ["a"], -1, math.nan, math.inf])
def test_sizes_that_are_none_are_refused(bad):
    with pytest.raises((TypeError, ValueError), match="number of bytes"):
        message_time(bad, SLOW)


@pytest.mark.parametrize("bad", [None, 1e9, "NVLink 4"])
def test_links_that_are_none_are_refused(bad):
    for call in (lambda: message_time(1, bad), lambda: half_size(bad)):
        with pytest.raises(TypeError, match="must be a hardware.Link"):
            call()


def test_the_picture_tells_the_same_numbers_in_letters():
    from lessons_lib.plots.message_picture import message_times

    told = repr(message_times(SLOW, ([1e6, 8e6], [4e-3, 9e-3])))
    assert "latency 1.00 ms, both terms equal at 1.0 MB" in told
    assert "1.0 MB: measured 4.00 ms, predicted 2.00 ms over slow, x 2.00" in told
    assert "8.0 MB: measured 9.00 ms, predicted 9.00 ms over slow, x 1.00" in told
    assert "image/png" in message_times([SLOW, NVLINK4])._repr_mimebundle_()[0]


@pytest.mark.parametrize("links", [[], [1], None, [SLOW] * 6])
def test_a_picture_needs_one_to_five_links(links):
    from lessons_lib.plots.message_picture import message_times

    with pytest.raises((TypeError, ValueError), match="link"):
        message_times(links)
