"""What lesson 04 says about tensor parallel at real size: volumes against closed forms, and each claim of its prose by replay."""

import dataclasses
import functools

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from lessons_lib import Cluster, formulas, models, replay, run, shapes, sweep  # noqa: E402
from lessons_lib.hardware import ETHERNET_100G, H100, IB_NDR, NVLINK4, PCIE4, PCIE5  # noqa: E402
from lessons_lib.parallel import tensor  # noqa: E402

EIGHT_B, SEVENTY_B, GPT3 = shapes.LLAMA3_8B, shapes.LLAMA3_70B, shapes.GPT3_175B
MODELS = pytest.mark.parametrize("shape", [EIGHT_B, SEVENTY_B, GPT3], ids=lambda shape: shape.name)


def layer(shape, tokens, batch, backward, recomputed, sequence_parallel):
    block = models.Block(shape, dtype=torch.bfloat16, attention=models.fused_attention)
    split = tensor.ParallelBlock(block, sequence_parallel=sequence_parallel)
    part = tokens // dist.get_world_size() if sequence_parallel else tokens
    x = torch.empty(batch, part, shape.hidden, dtype=torch.bfloat16, requires_grad=backward)
    with torch.set_grad_enabled(backward):
        y = checkpoint(split, x, use_reentrant=False, early_stop=False) if recomputed else split(x)
    if backward:
        y.backward(torch.empty_like(y))


@functools.cache
def record(shape, tokens, ranks, batch=1, backward=True, recomputed=False, sequence_parallel=False):
    shape = dataclasses.replace(shape, kv_heads=max(shape.kv_heads, ranks))
    options = (batch, backward, recomputed, sequence_parallel)
    return run(layer, shape, tokens, *options, ranks=ranks, shapes_only=True, alike=ranks > 1)


def regime(shape, name, ranks, batch=1):
    tokens = 1 if name == "decode" else shape.length
    return record(shape, tokens, ranks, batch, name == "training")


def one_machine(ranks, link):
    return Cluster(H100, 1, ranks, link)


def step(recording, link):
    return replay(recording, one_machine(recording.world_size, link)).step_time


def share(recording, link):
    timeline = replay(recording, one_machine(recording.world_size, link))
    return timeline.breakdown()[0][2] / timeline.step_time


def sent(recording):
    """(calls, bytes that each rank sends)."""
    rows = recording.collectives
    return sum(r[3] for r in rows), sum(formulas.bytes_sent(op, nbytes, n) * count for op, n, nbytes, count in rows)


# ---- volumes ---------------------------------------------------------------------------------------------------------------


@MODELS
@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_bytes_and_calls_of_a_layer(shape, ranks):
    """8 b s h (t-1)/t elements per device; sequence parallel the same in twice the calls; recomputation half as much again."""
    batch, tokens = 3, 512
    volume = 8 * batch * tokens * shape.hidden * (ranks - 1) / ranks * 2  # of 2 bytes
    assert sent(record(shape, tokens, ranks, batch)) == (4, volume)
    assert sent(record(shape, tokens, ranks, batch, sequence_parallel=True)) == (8, volume)
    assert sent(record(shape, tokens, ranks, batch, recomputed=True)) == (6, 1.5 * volume)
    assert sent(record(shape, tokens, ranks, batch, backward=False)) == (2, volume / 2)


def test_the_volume_saturates_and_never_shrinks():
    volumes = [sent(record(GPT3, 2048, ranks))[1] for ranks in (2, 4, 8, 16)]
    assert volumes == sorted(volumes) and volumes[-1] < 2 * volumes[0]
    assert [v / (2 * 2048 * GPT3.hidden) for v in volumes] == [4.0, 6.0, 7.0, 7.5]


@MODELS
def test_messages_of_decode_are_kilobytes_and_of_prefill_megabytes(shape):
    for batch in (1, 64):
        sizes = {nbytes for _, _, nbytes, _ in regime(shape, "decode", 8, batch).collectives}
        assert sizes == {batch * shape.hidden * 2}
    (size,) = {nbytes for _, _, nbytes, _ in regime(shape, "prefill", 8).collectives}
    assert size == shape.length * shape.hidden * 2 and 25e6 < size < 150e6


@MODELS
def test_a_layers_compute_is_divided_by_the_ranks(shape):
    """FLOPs (of products) of t ranks sum to those of one: no product is computed twice."""
    alone = sum(record(shape, 2048, 1).flops)
    for ranks in (2, 8):
        assert sum(record(shape, 2048, ranks).flops) == alone


def test_decode_is_set_by_memory_bandwidth_not_by_flops():
    """One token reads every weight once: twice the FLOP/s change nothing, twice the memory bandwidth nearly halve it."""
    recording = regime(SEVENTY_B, "decode", 1)
    weights = 2 * sum(shapes.layer_weights(SEVENTY_B).values())

    def seconds(**change):
        return replay(recording, Cluster(dataclasses.replace(H100, name="", launch_overhead=0, **change))).step_time

    assert weights / H100.memory_bandwidth < seconds() < 1.05 * weights / H100.memory_bandwidth
    assert seconds(flops=2 * H100.flops) > 0.99 * seconds()
    assert seconds(memory_bandwidth=2 * H100.memory_bandwidth) < 0.52 * seconds()


# ---- what the lesson concludes ------------------------------------------------------------------------------------------------


def test_the_lessons_question_eight_gpus_and_pcie_4_alone():
    """Llama-3 8B: a prompt is read fastest by one; training gains little after two; a token is written fastest by four."""
    prompt = {t: step(regime(EIGHT_B, "prefill", t), PCIE4) for t in (1, 2, 4, 8, 16)}
    assert list(prompt.values()) == sorted(prompt.values())
    training = {t: step(regime(EIGHT_B, "training", t), PCIE4) for t in (1, 2, 4, 8, 16)}
    assert training[2] < training[1] and training[2] / training[16] < 1.1 and training[1] / training[8] < 1.3
    token = {t: step(regime(EIGHT_B, "decode", t), PCIE4) for t in (1, 2, 4, 8, 16)}
    assert min(token, key=token.get) == 4 and token[8] < token[1] < token[16]


@pytest.mark.parametrize("link", [NVLINK4, PCIE5, PCIE4], ids=lambda link: link.name)
def test_a_token_of_the_70b_model_gets_faster_up_to_eight_whatever_the_link(link):
    token = {t: step(regime(SEVENTY_B, "decode", t), link) for t in (1, 2, 4, 8, 16)}
    assert token[1] > token[2] > token[4] > token[8] < token[16]


def test_latency_ends_it_even_on_nvlink():
    token = {t: step(regime(EIGHT_B, "decode", t), NVLINK4) for t in (1, 2, 4, 8, 16)}
    assert min(token, key=token.get) == 4


@MODELS
def test_two_machines_over_100_gbit_are_slower_than_one_with_half_the_gpus(shape):
    sixteen, eight = regime(shape, "training", 16), step(regime(shape, "training", 8), NVLINK4)
    assert replay(sixteen, Cluster(H100, 2, 8, NVLINK4, ETHERNET_100G)).step_time > eight
    assert replay(sixteen, Cluster(H100, 2, 8, NVLINK4, IB_NDR)).step_time < eight


@MODELS
def test_for_the_throughput_of_prompts_it_loses_even_on_nvlink(shape):
    assert step(regime(shape, "prefill", 8), NVLINK4) > step(regime(shape, "prefill", 1), NVLINK4) / 8


def test_for_the_throughput_of_tokens_it_wins_until_there_are_many_requests():
    """Eight copies read every weight eight times, one cut model once: Llama-3 8B over NVLink, up to 64 requests, not at 512."""
    for requests, wins in ((8, True), (64, True), (512, False)):
        together = step(regime(EIGHT_B, "decode", 8, requests), NVLINK4)
        assert (together < step(regime(EIGHT_B, "decode", 1, requests // 8), NVLINK4)) is wins
    assert step(regime(EIGHT_B, "decode", 8, 64), PCIE4) > step(regime(EIGHT_B, "decode", 1, 8), PCIE4)


def test_sequence_parallel_saves_time_too():
    """It sends the same and computes the norms of an eighth of the tokens: close to an eighth of what one GPU computes."""
    plain, sequence = (record(EIGHT_B, 8192, 8, backward=False, sequence_parallel=option) for option in (False, True))
    timelines = [replay(r, one_machine(8, NVLINK4)).breakdown()[0] for r in (plain, sequence)]
    alone = step(regime(EIGHT_B, "prefill", 1), NVLINK4)
    assert timelines[0][2] == pytest.approx(timelines[1][2])
    assert timelines[0][1] > 1.9 * alone / 8 and timelines[1][1] < 1.1 * alone / 8


def fastest_token(shape, link, floor):
    """The number of GPUs that write a token fastest, where each of the two all-reduces takes at least `floor` seconds."""
    found = {}
    for ranks in (1, 2, 4, 8):
        _, compute, communication, _ = replay(regime(shape, "decode", ranks), one_machine(ranks, link)).breakdown()[0]
        found[ranks] = compute + (2 * max(communication / 2, floor) if ranks > 1 else 0)
    return min(found, key=found.get)


@pytest.mark.parametrize("link", [NVLINK4, PCIE4], ids=lambda link: link.name)
def test_a_measured_floor_of_small_all_reduces_decides_for_the_8b_and_not_for_the_70b(link):
    floors = (0, 9e-6, 20e-6, 60e-6)
    assert [fastest_token(EIGHT_B, link, floor) for floor in floors] == [4, 4, 8 if link is NVLINK4 else 4, 1]
    assert [fastest_token(SEVENTY_B, link, floor) for floor in floors] == [8] * 4


def test_for_a_token_two_machines_of_8_beat_one_of_16():
    """Latencies of a hierarchical all-reduce, 2 x 7 inside and 2 across, against the 30 of a ring."""
    for shape in (EIGHT_B, SEVENTY_B, GPT3):
        sixteen = regime(shape, "decode", 16)
        for port in (IB_NDR, ETHERNET_100G):
            assert replay(sixteen, Cluster(H100, 2, 8, NVLINK4, port)).step_time < step(sixteen, NVLINK4)


def test_all_curves_meet_in_one_point_whatever_the_ranks():
    """A rank is spared (t-1)/t of the computing C and sends 4 x 2 x (t-1)/t of the buffer S: they meet at 8 S / C, without t.

    Exactly so under sequence parallel, but for latency; norms that every rank repeats move the point up, to the same for all t.
    """
    alone = step(record(EIGHT_B, 8192, 1), NVLINK4)
    predicted = 8 * 2 * 8192 * EIGHT_B.hidden / alone

    def crossing(ranks, sequence_parallel):
        recording = record(EIGHT_B, 8192, ranks, sequence_parallel=sequence_parallel)
        low, high = 10e9, 100e9
        for _ in range(30):
            middle = (low + high) / 2
            time = sweep(recording, one_machine(ranks, NVLINK4), link="intra_node", bandwidths=[middle])[0]
            low, high = (low, middle) if time < alone else (middle, high)
        return low

    for ranks in (2, 4, 8):
        assert crossing(ranks, True) == pytest.approx(predicted, rel=0.02)
        assert crossing(ranks, False) == pytest.approx(25.4e9, rel=0.01) and crossing(ranks, False) > predicted


def test_there_is_a_bandwidth_below_which_eight_lose_to_four():
    """Training of Llama-3 8B. From compute alone: c4 - c8 = (1.75 - 1.5) x bytes of four all-reduces / bandwidth, latency aside."""
    four, eight = regime(EIGHT_B, "training", 4), regime(EIGHT_B, "training", 8)
    times = [replay(r, one_machine(r.world_size, NVLINK4)).breakdown()[0][1] for r in (four, eight)]
    volume = 4 * EIGHT_B.length * EIGHT_B.hidden * 2
    crossing = 0.25 * volume / (times[0] - times[1] - 4 * (14 - 6) * NVLINK4.latency)
    for factor, wins in ((0.98, False), (1.02, True)):
        a, b = (sweep(r, one_machine(8, NVLINK4), link="intra_node", bandwidths=[factor * crossing])[0] for r in (four, eight))
        assert bool(b < a) is wins
    assert 20e9 < crossing < PCIE4.bandwidth


# ---- the folklore ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [EIGHT_B, SEVENTY_B], ids=lambda shape: shape.name)
def test_an_all_reduce_over_pcie_and_the_compute_beside_it(shape):
    """Prefill: 2-10 ms against milliseconds. Decode: 20-300 us against tens of microseconds. The saying mixes the two."""
    regimes = (("prefill", 1, (2e-3, 10e-3), (0.9e-3, 10e-3)), ("decode", 64, (20e-6, 300e-6), (10e-6, 200e-6)))
    for ranks in (2, 8):
        for name, batch, call, beside in regimes:
            recording = regime(shape, name, ranks, batch)
            nbytes = batch * (shape.length if name == "prefill" else 1) * shape.hidden * 2
            seconds = formulas.ring_all_reduce(nbytes, ranks, PCIE4.bandwidth, PCIE4.latency)
            assert call[0] < seconds < call[1]
            _, compute, communication, _ = replay(recording, one_machine(ranks, PCIE4)).breakdown()[0]
            assert communication == pytest.approx(2 * seconds) and beside[0] < compute / 2 < beside[1]


def test_25_to_50_percent_holds_in_some_regimes_only():
    """Few ranks with long sequences, many with short ones; with eight and a long sequence it is far more."""
    links, every = (PCIE4, PCIE5), (EIGHT_B, SEVENTY_B, GPT3)

    def shares(name, ranks):
        return [share(regime(shape, name, ranks), link) for shape in every for link in links]

    assert all(0.25 <= part <= 0.5 for part in shares("decode", 8))
    assert all(part < 0.25 for part in shares("decode", 2))
    assert all(part > 0.5 for part in shares("prefill", 8))
    assert sum(0.2 <= part <= 0.5 for part in shares("prefill", 2)) == 6
    assert max(shares("training", 8)) > 0.7


def test_measured_bandwidths_make_it_worse():
    """300 GB/s of 450 on 8 x H100 at 33.6 MB, 23 of PCIe 4's 31.5 on 4 x A100, 12.5 on 8: the share grows, to nine tenths."""
    for ranks, link, reached in ((8, NVLINK4, 300e9), (4, PCIE4, 23.3e9), (8, PCIE4, 12.5e9)):
        prompt = regime(EIGHT_B, "prefill", ranks)
        assert share(prompt, dataclasses.replace(link, name="", bandwidth=reached)) > share(prompt, link)
    assert share(regime(EIGHT_B, "prefill", 8), dataclasses.replace(PCIE4, name="", bandwidth=12.5e9)) > 0.9
