"""What lesson 05 says, run with the lesson's own functions: its mistakes, its counts, and each claim of its prose by replay."""

import ast
import csv
import dataclasses
import functools
import itertools
import types
from pathlib import Path

import nbformat
import pytest

torch = pytest.importorskip("torch")
import numpy as np  # noqa: E402

from lessons_lib import BufferMisuse, Cluster, Deadlock, RankFailed, replay, run, shapes, splitting, sweep  # noqa: E402
from lessons_lib.hardware import ETHERNET_10G, ETHERNET_100G, H100, IB_NDR, NVLINK4, PCIE4  # noqa: E402
from lessons_lib.parallel.schedules import gpipe, interleaved, one_f_one_b, timed, zero_bubble_h1  # noqa: E402
from lessons_lib.pipelines import balanced_layers, boundary_bytes, memory_of_ranks  # noqa: E402

HERE = Path(__file__).resolve().parent
CONSTANTS = {"tied", "gpt", "tokens", "inputs", "SIZE", "second", "nothing", "PUBLISHED", "LINKS", "llama"}
LLAMA, LIGHT, GPT3, LENGTH = shapes.LLAMA3_70B, shapes.LLAMA3_8B, shapes.GPT3_175B, 8192


@functools.cache
def lesson() -> types.SimpleNamespace:
    """The lesson's imports and functions, and the constants that these use; nothing of it has run."""
    notebook = nbformat.read(HERE.parent / "notebooks" / "05_pipeline_parallel.ipynb", as_version=4)
    kept = []
    for cell in notebook.cells:
        for node in ast.parse(cell.source).body if cell.cell_type == "code" else ():
            assigned = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
            constant = isinstance(node, ast.Assign) and assigned & CONSTANTS
            if constant or isinstance(node, (ast.Import, ast.ImportFrom, ast.FunctionDef)):
                kept.append(ast.get_source_segment(cell.source, node))
    names: dict = {"__name__": "lesson_05"}
    exec(compile("\n\n".join(kept), "lesson_05", "exec"), names)
    return types.SimpleNamespace(**names)


@functools.cache
def pieces(shape, length):
    return lesson().pieces(shape, length)


def step(shape, length, orders, link, layers=None):
    """Replayed on machines with one H100 each: the timeline."""
    recording = lesson().made(shape, length, pieces(shape, length), orders, layers)
    return replay(recording, lesson().machines(len(orders), link))


# ---- mistakes ------------------------------------------------------------------------------------------------------------------


def test_gradients_of_microbatches_are_scaled_by_their_share_of_the_samples():
    two, three = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0, 6.0])
    added_up = lesson().added_up
    assert added_up(two, 2, lambda one, m: 1) == 3.0 and added_up(two, 2, lambda one, m: 1 / m) == 1.5 == two.mean()
    assert added_up(three, 2, lambda one, m: 1 / m) == 3.75
    assert added_up(three, 2, lambda one, m: one.share) == 3.0 == three.mean()


@pytest.mark.parametrize("p, m", [(2, 2), (3, 5), (4, 10)])
def test_one_buffer_for_all_that_is_received_gives_wrong_gradients_without_an_error(p, m):
    own, size = lesson(), 10 // m  # every microbatch has as many samples
    inputs, targets = own.tokens[: size * m, :-1], own.tokens[: size * m, 1:]

    def one_buffer(step):
        stage = own.own_stages(own.models.Transformer(own.gpt))[0]
        if not stage.first:
            buffer = stage.make_buffer(inputs[:size])
            stage.make_buffer = lambda inputs: buffer.detach()
        step(stage, own.split_into_microbatches(inputs, targets, m), own.next_token_loss)
        whole = own.models.Transformer(own.gpt)
        own.next_token_loss(whole(inputs), targets).backward()
        pairs = zip(stage.parameters(), own.own_stages(whole)[0].parameters())
        return all(own.close(a.grad, b.grad) for a, b in pairs)

    # 1F1B has one in flight on the last rank: there nothing is overwritten too early
    assert not any(run(one_buffer, own.gpipe_step, ranks=p).results)
    assert run(one_buffer, own.one_f_one_b_step, ranks=p).results[-1]


def test_one_buffer_for_all_that_is_sent_is_named():
    with pytest.raises(BufferMisuse, match=r"Rank 0 used the tensor of its isend while it was in flight: it was written by fill_"):
        run(lesson().one_buffer_for_sends, 5, ranks=2)


def test_tied_copies_drift_apart_unless_their_gradients_are_summed():
    own = lesson()
    expected = own.trained_whole()
    first, *_, last = run(own.train, False, ranks=3).results
    assert (first - last).abs().max() > 0.1 * expected.abs().max()
    first, *_, last = run(own.train, True, ranks=3).results
    assert torch.equal(first, last) and own.close(first, expected)


def test_blocking_sends_deadlock_under_1f1b():
    with pytest.raises(Deadlock, match=r"rank 0 waits in send of \d+x16x32 float32 to rank 1.*rank 1 waits in send") as caught:
        run(lesson().attempt, ranks=2)
    assert "dist.isend" in str(caught.value)


# ---- counts --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_through_and_back_equals_one_process(p):
    assert run(lesson().one_step, ranks=p).results == [True] * p


def test_everybody_waits():
    own = lesson()
    shape = dataclasses.replace(shapes.GPT2_SMALL, tied=False)  # tied, one GPU adds up two gradients of the table besides
    alone, apart = (run(own.real_step, shape, 1024, ranks=p, shapes_only=True) for p in (1, 4))
    one, four = replay(alone, Cluster(H100)), replay(apart, Cluster(H100, intra_node=NVLINK4))
    assert 1 < four.step_time / one.step_time < 1.05
    assert own.computing(four) == pytest.approx(1 / 4, rel=0.05)


@pytest.mark.parametrize("p, m, frozen, slots", [(4, 8, True, 22), (8, 32, True, 78), (4, 8, False, 33), (3, 2, True, 8)])
def test_slots_of_the_recorded_programs(p, m, frozen, slots):
    own = lesson()
    for program in (own.gpipe_step, own.one_f_one_b_step):
        assert own.in_slots(program, p, m, frozen=frozen)[1].step_time == slots
    assert splitting.bubble_overhead(p, m) == pytest.approx(slots / (m * (2 if frozen else 3)) - 1)


def test_bytes_that_1f1b_keeps_do_not_shrink_with_the_ranks():
    own = lesson()
    kept = {p: run(own.peak, own.one_f_one_b_step, 8, ranks=p).results for p in (1, 2, 4, 8)}
    everything = kept[1][0]  # one microbatch in all layers
    for p, ranks in kept.items():
        assert ranks[0] == pytest.approx(everything, rel=0.1), p
        assert ranks == sorted(ranks, reverse=True)
    every = run(own.peak, own.gpipe_step, 8).results
    assert [a / b for a, b in zip(every, kept[4])] == pytest.approx([8 / 4, 8 / 3, 8 / 2, 8 / 1], rel=0.02)


def test_the_printed_rates_are_those_of_the_paper():
    table = csv.DictReader((HERE / "data" / "zerobubble_table5.csv").open(encoding="utf-8"))
    rows = {(row["model"], int(row["n_microbatches"]), row["schedule"]): row for row in table}
    for model, (p, m, v, *times, printed) in lesson().PUBLISHED.items():
        for name, rate in zip(("1F1B", "1F1B-I", "ZB-H1"), printed, strict=True):
            row = rows[model, m, name]
            assert (float(row["value"]), int(row["pp"])) == (rate, p)
            assert int(row["interleave_v"]) == (v if name == "1F1B-I" else 1)
            assert " ".join(f"{what}={time}" for what, time in zip(("TF", "TB", "TW", "Tcomm"), *times)) in row["notes"]


@pytest.mark.parametrize("name, make, v", [("ScheduleGPipe", gpipe, 1), ("Schedule1F1B", one_f_one_b, 1),
                                           ("ScheduleInterleaved1F1B", interleaved, 2)])  # fmt: skip
def test_pytorch_runs_the_same_slots(name, make, v):
    own = lesson()
    orders = make(4, 8, v) if v > 1 else make(4, 8)
    theirs = run(own.by_torch, name, 8, v, ranks=4)
    assert replay(theirs, Cluster(own.second, 1, 4, own.nothing)).step_time == timed(orders, backward=2).makespan
    large = sum(int(((e["kind"] == 1) & (e["nbytes"] == 4 * own.SIZE**2)).sum()) for e in theirs.events)
    assert large == timed(orders).messages == 2 * 8 * (4 * v - 1)


# ---- at real size --------------------------------------------------------------------------------------------------------------


def test_a_recording_put_together_is_the_real_one():
    own, shape = lesson(), shapes.GPT2_SMALL
    real = run(own.real_pipeline, shape, 256, 3, ranks=4, shapes_only=True)
    made = own.made(shape, 256, pieces(shape, 256), one_f_one_b(4, 3))
    assert made.sent_bytes.tolist() == real.sent_bytes.tolist() and made.flops == real.flops
    assert made.sent_bytes.sum() == 2 * 3 * 3 * boundary_bytes(shape, 256)
    for link in own.LINKS:
        a, b = (replay(recording, own.machines(4, link)).step_time for recording in (real, made))
        assert a == pytest.approx(b, abs=5e-6)  # the losses' addition is in no action


@pytest.mark.parametrize("shape, length", [(LLAMA, LENGTH), (GPT3, 2048)], ids=lambda value: getattr(value, "name", ""))
def test_the_link_hardly_matters_and_the_bubble_does(shape, length):
    busy = {p: [lesson().computing(step(shape, length, one_f_one_b(p, 64), link)) for link in lesson().LINKS] for p in (4, 16, 32)}
    for p, shares in busy.items():
        assert shares[0] - shares[2] < 0.03 and max(shares) < 1 - splitting.bubble_share(p, 64)  # PCIe 4 to 100 Gbit Ethernet
        assert shares[3] < shares[2] - 0.04  # 10 Gbit
    assert busy[4] > busy[16] > busy[32]


def test_only_1f1b_on_32_ranks_with_full_recomputation_fits():
    fits = {}
    for p, make, recompute in itertools.product((8, 16, 32), (gpipe, one_f_one_b), ("selective", "full")):
        held = memory_of_ranks(LLAMA, make(p, 64), LENGTH, recompute=recompute)
        fits[p, make.__name__, recompute] = max(one.total for one in held) <= H100.memory
    assert [key for key, yes in fits.items() if yes] == [(32, "one_f_one_b", "full")]
    first = [memory_of_ranks(LLAMA, one_f_one_b(p, 64), LENGTH, recompute="full")[0].activations for p in (4, 8, 16)]
    assert first[0] == first[1] == first[2]


@functools.cache
def cut_over_8(sequence_parallel):
    return lesson().cut_layers(8, sequence_parallel)


def test_all_layers_take_what_two_short_recordings_say():
    own, shape = lesson(), dataclasses.replace(LLAMA, layers=5)
    cluster = own.machines(8, IB_NDR)
    for sequence_parallel in (False, True):
        whole = run(own.tensor_step, shape, LENGTH, sequence_parallel, ranks=8, shapes_only=True, alike=True)
        one, two = (replay(recording, cluster).step_time for recording in cut_over_8(sequence_parallel))
        assert replay(whole, cluster).step_time == pytest.approx(one + 4 * (two - one), rel=1e-9)


def test_where_tensor_parallel_wins():
    """Plain, it never does with many microbatches, since each rank repeats norms and sums; with sequence parallel it does."""
    own = lesson()
    eight, bandwidths = own.machines(8, IB_NDR), np.geomspace(1e9, 1e12, 40)
    plain, divided = (
        own.all_layers(lambda recording: sweep(recording, eight, "inter_node", bandwidths), cut_over_8(kind))
        for kind in (False, True)
    )
    free = own.machines(8, own.nothing)
    alone = [own.all_layers(lambda recording: replay(recording, free).step_time, cut_over_8(kind)) for kind in (False, True)]
    first = {}
    for m in (4, 8, 64):
        recording = own.made(LLAMA, LENGTH, pieces(LLAMA, LENGTH), one_f_one_b(8, m))
        piped = sweep(recording, eight, "inter_node", bandwidths) / m
        for name, times in (("plain", plain), ("divided", divided)):
            first[name, m] = min(bandwidths[times < piped], default=np.inf)
    assert PCIE4.bandwidth < first["plain", 4] < first["plain", 8] < NVLINK4.bandwidth and first["plain", 64] == np.inf
    assert first["divided", 4] < first["plain", 4] and first["divided", 8] < 0.5 * first["plain", 8]
    assert NVLINK4.bandwidth < first["divided", 64] < 1e12
    timeline = replay(recording, free)  # m = 64
    assert alone[1] == pytest.approx(own.computing(timeline) * timeline.step_time / 64, rel=0.02)  # all work is divided
    assert alone[0] > 1.5 * alone[1] and alone[0] > timeline.step_time / 64 > alone[1]


def test_the_last_stage_gets_fewer_layers():
    head, block = pieces(LIGHT, LENGTH)[0][2].flops, pieces(LIGHT, LENGTH)[0][1].flops
    assert 1.5 < head / block < 2

    def seconds(layers):
        return step(LIGHT, LENGTH, one_f_one_b(8, 32), IB_NDR, layers).step_time

    even, best = seconds([4] * 8), seconds([5, 5, 4, 4, 4, 4, 4, 2])
    assert best < seconds(balanced_layers(LIGHT, 8, LENGTH)) < 0.9 * even
    assert best < seconds([5, 5, 5, 4, 4, 4, 4, 1])
    for layers in ([5, 4, 4, 4, 4, 4, 4, 3], [4, 5, 5, 4, 4, 4, 4, 2]):  # to whom they go hardly matters
        assert best <= seconds(layers) < 1.01 * best


def test_a_pipeline_does_not_shorten_one_request():
    own, shape = lesson(), shapes.GPT2_SMALL
    times = {}
    for p, requests in itertools.product((1, 2, 4), (1, 8)):
        recording = run(own.answer, shape, requests, ranks=p, shapes_only=True)
        times[p, requests] = replay(recording, own.machines(p, ETHERNET_100G)).step_time
    hop = ETHERNET_100G.latency + 2 * shape.hidden / ETHERNET_100G.bandwidth
    for p in (2, 4):
        assert times[p, 1] == pytest.approx(times[1, 1] + (p - 1) * hop, rel=1e-6)
    assert times[1, 8] == pytest.approx(8 * times[1, 1]) and times[4, 8] < times[2, 8] < times[1, 8]


def test_the_question_from_the_top():
    own = lesson()
    forwards, (embedding, block, head) = pieces(LLAMA, LENGTH)
    recomputed = forwards, [embedding, forwards[1] + block, head]
    busy, each = [], []
    for m in (32, 64, 128, 256):
        recording = own.made(LLAMA, LENGTH, recomputed, one_f_one_b(32, m))
        timeline = replay(recording, own.machines(32, ETHERNET_100G))
        busy.append(own.computing(timeline))
        each.append(timeline.step_time / m)
    assert busy == sorted(busy) and each == sorted(each, reverse=True)
    assert (
        busy[0] < 0.5 and busy[3] < 2.5 / 3
    )  # of 80 layers on 32 stages some have 3: what is lost with any number of microbatches
    assert 0.63 < busy[2] < 0.7  # at m = 128 a third of the time is lost
    piped = step(LLAMA, LENGTH, one_f_one_b(8, 64), ETHERNET_100G).step_time / 64
    eight = own.machines(8, ETHERNET_100G)
    assert own.all_layers(lambda recording: replay(recording, eight).step_time, cut_over_8(False)) > 5 * piped
    with pytest.raises(RankFailed, match="32 ranks, but only 8 key and value heads"):
        own.cut_layers(32, layers=[1])


def test_when_this_is_wrong():
    few = [step(LLAMA, LENGTH, one_f_one_b(p, 8), IB_NDR) for p in (4, 32)]
    assert few[0].step_time / few[1].step_time < 3 and lesson().computing(few[1]) < 0.25
    slow = {p: step(LLAMA, LENGTH, one_f_one_b(p, 8), ETHERNET_10G).step_time for p in (4, 8, 16, 32)}
    assert slow[4] > slow[8] > slow[16] < slow[32]  # there is a best number of ranks
    for link, better in ((IB_NDR, True), (ETHERNET_10G, False)):
        plain, chunks = (step(LLAMA, LENGTH, orders, link).step_time for orders in (one_f_one_b(16, 32), interleaved(16, 32, 5)))
        assert (chunks < plain) == better


def test_what_the_widget_answers():
    """The answers folded under the questions, without the widget."""
    from lessons_lib.explorers.pipeline_setting import Setting

    def setting(schedule, stages, m, ratio=3.0):
        return Setting(LLAMA, H100, LENGTH, 1, schedule, stages, m, 2, ratio, "full")

    def shown(link, *args, **more):
        return replay(setting(*args, **more).recording, Cluster(H100, 1, args[1], link))

    def idle(*args, **more):
        return 1 - lesson().computing(shown(ETHERNET_100G, *args, **more))

    third = {p: next(m for m in range(p, 64) if idle("1F1B", p, m) <= 1 / 3) for p in (8, 16)}
    alone = {p: next(m for m in range(p, 64) if splitting.bubble_share(p, m) <= 1 / 3) for p in (8, 16)}
    assert third == {8: 17, 16: 48} and alone == {8: 14, 16: 30}
    names = ("ZB-H1", "interleaved 1F1B", "1F1B", "GPipe")
    near, far = ([shown(link, name, 8, 8).step_time for name in names] for link in (ETHERNET_100G, ETHERNET_10G))
    assert near[0] < near[1] < near[2] and near[2] == pytest.approx(near[3], rel=0.01)
    lost = [b - a for a, b in zip(near, far)]
    assert max(lost) == lost[1] and min(lost) == lost[3] and far[3] < far[2]  # GPipe passes 1F1B
    held = {name: max(one.total for one in setting(name, 8, 8).memory) for name in names}
    assert max(held, key=held.get) == "ZB-H1" and 2 * held["1F1B"] < held["ZB-H1"]
    assert abs(idle("1F1B", 8, 16, 0.5) - idle("1F1B", 8, 16, 4.0)) < 0.01
    split = {ratio: idle("ZB-H1", 8, 16, ratio) for ratio in (0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0)}
    assert min(split, key=split.get) == 2.0 and split[2.0] + 0.02 < min(split[1.0], split[3.0])  # F = B = W
    base = shown(ETHERNET_100G, "1F1B", 8, 32).step_time
    for change in ({"latency": ETHERNET_100G.latency / 2}, {"bandwidth": 2 * ETHERNET_100G.bandwidth}):
        assert shown(dataclasses.replace(ETHERNET_100G, **change), "1F1B", 8, 32).step_time > 0.995 * base
    room = {
        (n, p): max(one.total for one in setting(n, p, 32).memory) / H100.memory
        for n in names
        if n != names[1]
        for p in (20, 24, 32)
    }
    assert max(one.total for one in setting(names[1], 32, 32).memory) <= H100.memory
    assert 1 < room["1F1B", 20] < 1.05 and [key for key, part in room.items() if part <= 1] == [("1F1B", 24), ("1F1B", 32)]


def test_messages_slow_1f1b_in_every_round_and_gpipe_only_while_it_fills_and_drains():
    more = {
        m: [timed(orders(4, m), hop=0.5).makespan - timed(orders(4, m)).makespan for orders in (gpipe, one_f_one_b)]
        for m in (8, 32)
    }
    assert more[8][0] == more[32][0] == 2 * 3 * 0.5 and more[32][1] > 2.5 * more[8][1]


def test_zero_bubble_keeps_no_more_microbatches_and_a_third_of_the_bubble():
    for p, m in ((4, 8), (8, 32)):
        plain, split = timed(one_f_one_b(p, m), backward=2), timed(zero_bubble_h1(p, m))
        assert max(split.idle) * 3 == max(plain.idle) and max(split.peak_kept) == max(plain.peak_in_flight) == p
