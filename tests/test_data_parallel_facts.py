"""What the course says of data parallel, each statement held against real runs, recordings and replays.

The closed forms themselves are held against published numbers in test_splitting.py.
"""

import json
import random
import re
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.profiler import record_function  # noqa: E402

from lessons_lib import formulas, hardware, replay, run, shapes, splitting  # noqa: E402
from lessons_lib.hardware import Cluster, Device, Link  # noqa: E402
from lessons_lib.models import Transformer, fused_attention, next_token_loss  # noqa: E402
from lessons_lib.parallel import data  # noqa: E402
from lessons_lib.recording import COLLECTIVE  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]


def only_flops(flops):
    """A device without memory limits or launches: times are FLOPs / flops."""
    return Device(flops, 1e30, 1e30, 1.0)


def sent(recording, rank=0):
    """Bytes that the rank sends with its collectives."""
    calls = [e for e in recording.events[rank] if e["kind"] == COLLECTIVE]
    return sum(formulas.bytes_sent(recording.ops[e["op"]], int(e["nbytes"]), recording.world_size) for e in calls)


# ---- gradients are averaged over samples (or tokens) ------------------------------------------------------------------------


@pytest.mark.parametrize("counts", [(5, 1), (3, 0, 4), (1, 2, 3, 4)])
def test_the_mean_is_over_tokens_where_ranks_hold_different_numbers(counts):
    def program(counts):
        rank = dist.get_rank()
        mine = torch.arange(float(sum(counts))).split(list(counts))[rank]
        weight = nn.Parameter(torch.ones(()))
        (weight * mine).mean().backward()
        data.average_gradients([weight], data.share_of_batch(len(mine)))
        return weight.grad.item()

    expected = np.arange(sum(counts)).mean()
    assert run(program, counts, ranks=len(counts)).results == pytest.approx([expected] * len(counts), rel=1e-6)


# ---- volume: 2(N-1)/N or 3(N-1)/N times the gradients, whatever N -----------------------------------------------------------


def tiny_step(stage, microbatches=1):
    model = Transformer(shapes.TINY)
    tokens = torch.zeros(2 * microbatches, 9, dtype=torch.int64)

    def sgd(shards):
        return torch.optim.SGD(shards, lr=0.1)

    def loss_of(part):
        return next_token_loss(model(part[:, :-1]), part[:, 1:])

    parts = tokens.tensor_split(microbatches)
    if stage == 0:
        buckets = data.Buckets(model, 100_000)
        data.accumulate_gradients(loss_of, parts, buckets)
        buckets.wait()
    else:
        parts_of = () if stage == 1 else (model.blocks,)
        zero = (data.Zero1, data.Zero2, data.Zero3)[stage - 1](model, *parts_of, sgd)
        data.accumulate_gradients(loss_of, parts)
        zero.reduce_gradients()
        zero.step()


@pytest.mark.parametrize("ranks", [2, 8, 64, 512])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_volume_does_not_shrink_with_the_number_of_ranks(stage, ranks):
    gradients = 4 * shapes.total_parameters(shapes.TINY)
    found = sent(run(tiny_step, stage, ranks=ranks, shapes_only=True, alike=True))
    expected = splitting.data_parallel_bytes(gradients, ranks, stage)
    if stage == 3:  # what is in no block is gathered once, not twice
        rest = gradients - 4 * shapes.TINY.layers * sum(shapes.layer_parameters(shapes.TINY).values())
        expected -= (ranks - 1) / ranks * rest
    padding = ranks * 5 * 4 * 3  # at most ranks - 1 elements a unit, three times over
    assert expected <= found <= expected + padding + 1e-6
    assert found >= (ranks - 1) / ranks * 2 * gradients * (1 - 1e-12)


@pytest.mark.parametrize("microbatches", [1, 2, 5])
def test_stages_2_and_3_send_anew_for_every_microbatch(microbatches):
    """(m + 1) and about 3m times (n-1)/n of the gradients; plain data parallel and stage 1 send 2(n-1)/n once."""
    gradients, ranks = 4 * shapes.total_parameters(shapes.TINY), 4  # which divide all units
    rest = gradients - 4 * shapes.TINY.layers * sum(shapes.layer_parameters(shapes.TINY).values())
    passes = {0: 2 * gradients, 1: 2 * gradients, 2: (microbatches + 1) * gradients, 3: microbatches * (3 * gradients - rest)}
    for stage, expected in passes.items():
        found = sent(run(tiny_step, stage, microbatches, ranks=ranks, shapes_only=True, alike=True))
        assert found == pytest.approx((ranks - 1) / ranks * expected, rel=1e-12)


# ---- hiding does not depend on the number of parameters -----------------------------------------------------------------------


def equal_layers(layers, width, rows, bucket_bytes):
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    buckets = data.Buckets(model, bucket_bytes)
    output = model(torch.zeros(rows, width, requires_grad=True)).sum()
    with record_function("backward"):
        output.backward()
    buckets.wait()


def shapes_of(program, *args, ranks):
    return run(program, *args, ranks=ranks, shapes_only=True, alike=True)


def ratio_of(timeline):
    spans, moves = timeline.columns, timeline.transfer_columns
    backward = (spans["rank"] == 0) & (spans["kind"] == 0) & (spans["label"] == timeline.labels.index("backward"))
    return (moves["end"] - moves["start"]).sum() / (spans["end"] - spans["start"])[backward].sum()


@pytest.mark.parametrize("seed", range(3))
def test_the_ratio_is_the_closed_form_whatever_the_number_of_parameters(seed):
    random.seed(seed)
    tokens, ranks = random.randint(100, 9000), random.choice([2, 3, 8, 40])
    flops, bandwidth = random.uniform(1e12, 1e15), random.uniform(1e9, 1e12)
    expected = splitting.hiding_ratio(ranks, tokens, flops, bandwidth, bytes_each=4)
    for layers, width in ((2, 64), (9, 128), (3, 1000)):
        recording = shapes_of(equal_layers, layers, width, tokens, 4 * width**2, ranks=ranks)
        timeline = replay(recording, Cluster(only_flops(flops), devices_per_node=ranks, intra_node=Link(bandwidth, 0.0)))
        assert ratio_of(timeline) == pytest.approx(expected, rel=1e-9)


def transformer_step(shape):
    model = Transformer(shape, dtype=torch.bfloat16, attention=fused_attention)
    buckets = data.Buckets(model, 10**9)
    tokens = torch.zeros(1, shape.length + 1, dtype=torch.int64)
    loss = next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])
    with record_function("backward"):
        loss.backward()
    buckets.wait()


@pytest.mark.parametrize("shape", [shapes.GPT2_SMALL, shapes.GPT3_1_3B], ids=lambda shape: shape.name)
def test_of_a_transformer_it_is_the_closed_form_but_for_what_that_leaves_out(shape):
    flops, bandwidth, ranks = 1e14, 1e10, 8
    timeline = replay(shapes_of(transformer_step, shape, ranks=ranks), Cluster(only_flops(flops), intra_node=Link(bandwidth, 0.0)))
    # Attention's scores, too, which a fused attention computes once more in backward
    again = shape.layers * shapes.layer_flops(shape, shape.length)["scores"]
    counted = 2 * shapes.forward_flops(shape, shape.length) + again
    left_out = 4 * shapes.total_parameters(shape) / counted
    expected = splitting.hiding_ratio(ranks, shape.length, flops, bandwidth) * left_out
    assert ratio_of(timeline) == pytest.approx(expected, rel=1e-6)


# ---- exposed communication of buckets -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_uniform_buckets_expose_the_last_and_what_queues(seed):
    """c + (B - 1) max(0, c - b), with B buckets, b seconds of backward and c seconds of all-reduce each."""
    random.seed(seed)
    layers, width, rows, ranks = random.randint(1, 12), random.randint(10, 900), random.randint(1, 5000), random.choice([2, 3, 8])
    flops, latency = random.uniform(1e12, 1e14), random.uniform(0, 1e-4)
    recording = shapes_of(equal_layers, layers, width, rows, 4 * width**2, ranks=ranks)
    backward = 4 * width**2 * rows / flops
    for share in (0.1, 0.7, 1.3, 5.0):  # the all-reduce, without latency, over the backward
        bandwidth = 2 * (ranks - 1) / ranks * 4 * width**2 / (share * backward)
        all_reduce = formulas.ring_all_reduce(4 * width**2, ranks, bandwidth, latency)
        timeline = replay(recording, Cluster(only_flops(flops), devices_per_node=ranks, intra_node=Link(bandwidth, latency)))
        expected = all_reduce + (layers - 1) * max(0.0, all_reduce - backward)
        for _, compute, communication, idle in timeline.breakdown():
            assert communication == pytest.approx(expected, rel=1e-9)
            assert compute == pytest.approx(1.5 * layers * backward, rel=1e-9)  # forward is half of backward
            assert idle == pytest.approx(0, abs=1e-12)


def widths(sizes, rows):
    model = nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in zip(sizes, sizes[1:])))
    buckets = data.Buckets(model, 1)  # one a layer
    model(torch.zeros(rows, sizes[0], requires_grad=True)).sum().backward()
    buckets.wait()


@pytest.mark.parametrize("seed", range(4))
def test_buckets_of_any_sizes_go_one_after_the_other(seed):
    """Bucket k starts when it is filled and the one before has ended: the sum is exposed from the end of backward on."""
    random.seed(seed)
    sizes, rows, ranks = [random.randint(10, 900) for _ in range(random.randint(2, 9))], random.randint(1, 3000), 4
    flops, link = 1e12, Link(random.uniform(1e8, 1e11), random.uniform(0, 1e-4))
    filled = ended = 0.0
    for a, b in reversed(list(zip(sizes, sizes[1:]))):
        filled += 4 * a * b * rows / flops
        ended = max(filled, ended) + formulas.ring_all_reduce(4 * a * b, ranks, link.bandwidth, link.latency)
    recording = shapes_of(widths, sizes, rows, ranks=ranks)
    timeline = replay(recording, Cluster(only_flops(flops), devices_per_node=ranks, intra_node=link))
    assert timeline.breakdown()[0][2] == pytest.approx(ended - filled, rel=1e-9)


# ---- how many machines: it hangs on the ports ---------------------------------------------------------------------------------


def bucketed_step(shape, sequences):
    model = Transformer(shape, dtype=torch.bfloat16, attention=fused_attention)
    buckets = data.Buckets(model)
    tokens = torch.zeros(sequences, shape.length + 1, dtype=torch.int64)
    next_token_loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()
    buckets.wait()


def test_with_a_port_for_each_gpu_a_second_machine_helps_and_with_one_port_for_eight_it_harms():
    """256 sequences of the 1.3B model a step over 25 Gbit Ethernet, on one machine of 8 and on two."""
    own, shared = hardware.ETHERNET_25G, Link(hardware.ETHERNET_25G.bandwidth / 8, hardware.ETHERNET_25G.latency)
    recordings = {n: shapes_of(bucketed_step, shapes.GPT3_1_3B, 256 // n, ranks=n) for n in (8, 16)}

    def step(n, network):
        return replay(recordings[n], Cluster(hardware.H100, nodes=n // 8, inter_node=network)).step_time

    alone = step(8, own)
    assert step(16, own) < 0.6 * alone  # nearly half: all but the last bucket hides
    assert step(16, shared) > alone
    # Across two machines a device sends 2 (m-1)/m = 1 times its eighth, which takes longer than computing half a batch
    sent = 2 * (1 / 2) * shapes.parameter_bytes(shapes.GPT3_1_3B) / 8 / shared.bandwidth
    assert step(16, shared) > sent > alone / 2


# ---- memory, which recipe ---------------------------------------------------------------------------------------------------


def bytes_held(stage):
    """Bytes that a rank holds after a step's backward, all in float32: no separate master copy."""
    model = Transformer(shapes.TINY)

    def adamw(parameters):
        return torch.optim.AdamW(parameters, lr=1e-3)

    zero = {0: lambda: None, 1: lambda: data.Zero1(model, adamw)}.get(
        stage, lambda: (data.Zero2 if stage == 2 else data.Zero3)(model, model.blocks, adamw)
    )()
    optimizer = zero.optimizer if zero else adamw(model.parameters())
    for _ in range(2):  # the second time there are states
        model.zero_grad()
        tokens = torch.zeros(2, 9, dtype=torch.int64)
        next_token_loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()
        held = [p for p in model.parameters()] + [p.grad for p in model.parameters() if p.grad is not None]
        if zero:
            held += zero.shards + [shard.grad for shard in zero.shards if shard.grad is not None]
        held += [t for state in optimizer.state.values() for t in state.values() if t.dim()]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
        if zero:
            zero.reduce_gradients()
            zero.step()
        else:
            optimizer.step()
    return sum(storages.values())


@pytest.mark.parametrize("ranks", [2, 4])  # which divide all units: nothing is padded
def test_bytes_held_in_float32_are_16_over_n_under_stage_3(ranks):
    total = shapes.total_parameters(shapes.TINY)
    plain, first, second, third = (run(bytes_held, stage, ranks=ranks).results[0] / total for stage in range(4))
    assert plain == 16  # weight, gradient, two moments
    assert first == 8 + 12 / ranks  # weight and gradient; shards and their moments
    assert second == 4 + 16 / ranks
    assert third == 16 / ranks


# ---- say strong or weak ------------------------------------------------------------------------------------------------------


def texts_of(path):
    """Each cell's prose, or code with what it printed."""
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        outputs = [o.get("text") or o.get("data", {}).get("text/plain", "") for o in cell.get("outputs", [])]
        yield "".join(["".join(cell["source"]), *("".join(text) for text in outputs)])


def test_where_scaling_efficiency_is_quoted_it_says_strong_or_weak():
    quoted = 0
    for path in sorted(ROOT.glob("*/03_data_parallel.ipynb")):
        for text in texts_of(path):
            if re.search(r"scaling efficiency|efficiency of scaling", text, re.I):
                quoted += 1
                assert re.search(r"strong|weak", text, re.I), f"{path.name}: {text[:200]}"
    assert quoted
