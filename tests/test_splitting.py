"""Closed forms of data, tensor and pipeline parallel against numbers from papers and against sums done another way."""

import math
import random

import numpy as np
import pytest

from lessons_lib.formulas import bytes_sent, ring_all_reduce
from lessons_lib.splitting import (
    boundary_bytes,
    bubble_overhead,
    bubble_share,
    data_parallel_bytes,
    hiding_ratio,
    most_in_flight,
    state_bytes_per_parameter,
    tensor_parallel_bytes,
)

SIZES = [1, 2, 3, 5, 8, 64, 1000]


# ---- data parallel -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", SIZES)
def test_data_parallel_sends_an_all_reduce_and_zero_3_half_as_much_again(ranks):
    gradients = random.Random(ranks).randrange(1, 10**12)
    all_reduce = bytes_sent("all_reduce", gradients, ranks)
    halves = bytes_sent("reduce_scatter", gradients, ranks) + bytes_sent("all_gather", gradients, ranks)
    for zero in (0, 1, 2):
        assert data_parallel_bytes(gradients, ranks, zero) == pytest.approx(all_reduce, rel=1e-12)
    assert data_parallel_bytes(gradients, ranks, 1) == pytest.approx(halves, rel=1e-12)
    assert data_parallel_bytes(gradients, ranks, 3) == pytest.approx(1.5 * all_reduce, rel=1e-12)


def test_its_volume_does_not_shrink_with_the_number_of_ranks():
    volumes = [data_parallel_bytes(10**9, n) for n in SIZES]
    assert volumes == sorted(volumes) and volumes[0] == 0 and volumes[-1] == pytest.approx(2e9, rel=2e-3)


@pytest.mark.parametrize("ranks", [2, 3, 8, 64])
def test_whether_the_all_reduce_hides_does_not_depend_on_the_number_of_parameters(ranks):
    draw = random.Random(ranks)
    flops, bandwidth, tokens = draw.uniform(1e13, 1e15), draw.uniform(1e9, 1e12), draw.randrange(1, 10**5)
    for parameters in (10**6, 1_300_000_000, 175 * 10**9):
        all_reduce = ring_all_reduce(2 * parameters, ranks, bandwidth)
        backward = 4 * parameters * tokens / flops  # two products of 2 FLOPs a parameter and token
        assert hiding_ratio(ranks, tokens, flops, bandwidth) == pytest.approx(all_reduce / backward, rel=1e-12)
    assert hiding_ratio(ranks, tokens, flops, bandwidth, 4) == pytest.approx(2 * hiding_ratio(ranks, tokens, flops, bandwidth))


def test_the_ratio_falls_as_tokens_rise_over_a_whole_axis_of_bandwidths():
    bandwidths = np.array([1e9, 12.5e9, 450e9])
    few, many = hiding_ratio(8, 2048, 4e14, bandwidths), hiding_ratio(8, 4096, 4e14, bandwidths)
    assert np.allclose(few, 2 * many) and (np.diff(few) < 0).all()
    assert hiding_ratio(1, 1, 1e15, 1e9) == 0


@pytest.mark.parametrize("ranks", SIZES)
def test_memory_per_parameter_is_that_of_the_paper(ranks):
    assert state_bytes_per_parameter(ranks) == 16
    assert state_bytes_per_parameter(ranks, 1) == pytest.approx(4 + 12 / ranks)
    assert state_bytes_per_parameter(ranks, 2) == pytest.approx(2 + 14 / ranks)
    assert state_bytes_per_parameter(ranks, 3) == pytest.approx(16 / ranks)
    assert state_bytes_per_parameter(ranks, 0, gradient_bytes=4) == 18


@pytest.mark.parametrize(
    "zero, ranks, gigabytes",  # ZeRO, arXiv:1910.02054, table 1: 7.5, 128 and 1000 billion parameters
    [
        (1, 1, 120), (1, 4, 52.5), (1, 16, 35.6), (1, 64, 31.4), (1, 256, 30.4), (1, 1024, 30.1),
        (2, 4, 41.3), (2, 16, 21.6), (2, 64, 16.6), (2, 256, 15.4), (2, 1024, 15.1),
        (3, 4, 30), (3, 16, 7.5), (3, 64, 1.88), (3, 256, 0.47), (3, 1024, 0.12),
    ],
)  # fmt: skip
def test_the_table_of_the_zero_paper(zero, ranks, gigabytes):
    ours = 7.5 * state_bytes_per_parameter(ranks, zero)
    assert math.isclose(ours, gigabytes, abs_tol=0.5 * 10 ** -(2 if gigabytes < 2 else 1) + 1e-9)


def test_175_billion_parameters_over_64_ranks_under_zero_3():
    assert 175e9 * state_bytes_per_parameter(64, 3) == 43.75e9


# ---- tensor parallel -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", SIZES)
def test_tensor_parallel_sends_eight_times_the_activation_in_elements(ranks):
    b, s, h = (random.Random(10 * ranks + i).randrange(1, 5000) for i in range(3))
    elements = tensor_parallel_bytes(b, s, h, ranks, bytes_each=1)
    assert elements == pytest.approx(8 * b * s * h * (ranks - 1) / ranks, rel=1e-12)
    assert elements == pytest.approx(4 * bytes_sent("all_reduce", b * s * h, ranks), rel=1e-12)
    assert tensor_parallel_bytes(b, s, h, ranks, recompute=True) == pytest.approx(1.5 * 2 * elements, rel=1e-12)


def test_it_saturates_and_never_shrinks():
    volumes = [tensor_parallel_bytes(1, 2048, 12288, t) for t in SIZES]
    assert volumes == sorted(volumes) and volumes[-1] < 8 * 2048 * 12288 * 2


# ---- pipeline parallel ---------------------------------------------------------------------------------------------------------


def test_the_two_bubbles_of_4_stages_and_8_microbatches():
    assert bubble_overhead(4, 8) == 0.375
    assert bubble_share(4, 8) == 3 / 11  # 27.3%


@pytest.mark.parametrize("stages, microbatches, slots", [(8, 32, 78), (4, 8, 22)])
def test_slots_of_a_step_with_forward_and_backward_of_one_slot_each(stages, microbatches, slots):
    assert 2 * microbatches * (1 + bubble_overhead(stages, microbatches)) == pytest.approx(slots)
    assert 2 * microbatches / (1 - bubble_share(stages, microbatches)) == pytest.approx(slots)


@pytest.mark.parametrize("stages", [1, 2, 4, 7])
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_share_and_overhead_are_one_bubble_and_chunks_divide_it(stages, chunks):
    for microbatches in (1, 4, 12):
        over, share = bubble_overhead(stages, microbatches, chunks), bubble_share(stages, microbatches, chunks)
        assert share == pytest.approx(over / (1 + over))
        assert over == pytest.approx(bubble_overhead(stages, microbatches) / chunks)


def test_in_flight_under_1f1b():
    assert [most_in_flight(4, 8, rank) for rank in range(4)] == [4, 3, 2, 1]
    assert [most_in_flight(4, 2, rank) for rank in range(4)] == [2, 2, 2, 1]


def test_the_boundary_of_a_stage():
    assert boundary_bytes(1, 2048, 12288) == 50_331_648
    assert boundary_bytes(3, 5, 7, 4) == 420


# ---- bad input -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [0, -1, True, 1.5, None, "2", math.nan, math.inf, 10**30])
@pytest.mark.parametrize(
    "call",
    [
        lambda n: data_parallel_bytes(1, n), lambda n: hiding_ratio(n, 1, 1, 1), lambda n: hiding_ratio(2, n, 1, 1),
        state_bytes_per_parameter, lambda n: tensor_parallel_bytes(n, 1, 1, 2), lambda n: tensor_parallel_bytes(1, 1, 1, n),
        lambda n: bubble_overhead(n, 1), lambda n: bubble_share(1, n), lambda n: bubble_share(1, 1, n),
        lambda n: most_in_flight(n, 1), lambda n: boundary_bytes(1, n, 1),
    ],
)  # fmt: skip
def test_a_count_that_is_none_is_named(call, bad):
    with pytest.raises((TypeError, ValueError), match="must be a whole number from 1 to"):
        call(bad)


@pytest.mark.parametrize("bad", [-1, True, None, "2", math.nan, math.inf, [], [1, -1]])
@pytest.mark.parametrize(
    "call",
    [
        lambda x: data_parallel_bytes(x, 2), lambda x: hiding_ratio(2, 1, x, 1), lambda x: hiding_ratio(2, 1, 1, x),
        lambda x: hiding_ratio(2, 1, 1, 1, x), lambda x: tensor_parallel_bytes(1, 1, 1, 2, x), lambda x: boundary_bytes(1, 1, 1, x),
    ],
)  # fmt: skip
def test_an_amount_that_is_none_is_named(call, bad):
    with pytest.raises((TypeError, ValueError), match="must be"):
        call(bad)


@pytest.mark.parametrize("bad", [-1, 4, True, 1.0, None, "1"])
def test_the_stage_of_zero_is_0_to_3(bad):
    for call in (lambda z: data_parallel_bytes(1, 2, z), lambda z: state_bytes_per_parameter(2, z)):
        with pytest.raises((TypeError, ValueError), match="whole number from 0 to 3"):
            call(bad)


def test_other_bad_arguments_are_named():
    with pytest.raises(ValueError, match="gradient_bytes must be 2 .* or 4 .*, not 3"):
        state_bytes_per_parameter(2, 0, 3)
    with pytest.raises(TypeError, match="recompute must be True .* or False, not 1"):
        tensor_parallel_bytes(1, 1, 1, 2, 2, 1)
    with pytest.raises(ValueError, match="rank is 4, but must be a whole number from 0 to 3"):
        most_in_flight(4, 8, 4)
