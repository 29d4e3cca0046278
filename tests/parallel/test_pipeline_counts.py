"""Pipeline parallel by hand: messages, bytes and FLOPs of theory, the replay beside the table, memory in flight, long runs."""

import gc
import sys
from dataclasses import replace
from fractions import Fraction

import pytest

torch = pytest.importorskip("torch")
import pipeline_programs as programs  # noqa: E402
import torch.distributed as dist  # noqa: E402
from pipeline_programs import PRODUCT, SEQUENCE, SHAPE, STEPS, batch, model_of, products, run_ways, trained  # noqa: E402

from lessons_lib import replay, run  # noqa: E402
from lessons_lib.hardware import Cluster, Device, Link  # noqa: E402
from lessons_lib.models import next_token_loss  # noqa: E402
from lessons_lib.parallel import pipeline, schedules  # noqa: E402
from lessons_lib.recording import COMPUTE  # noqa: E402

SLOTS = Device(PRODUCT, 1e30, 1e30, 1.0)  # a product takes one slot, all else nothing
INSTANT = Link(1e30, 0.0)


def cluster(link=INSTANT):
    return Cluster(SLOTS, devices_per_node=64, intra_node=link)


def tables(p, m):
    found = {"GPipe": schedules.gpipe(p, m), "1F1B": schedules.one_f_one_b(p, m), "ZB-H1": schedules.zero_bubble_h1(p, m)}
    return found | ({"interleaved": schedules.interleaved(p, m, 2)} if m % p == 0 else {})


# ---- messages and bytes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p,samples,m", [(2, 3, 2), (3, 5, 3), (4, 11, 8)])
def test_messages_and_bytes_are_those_of_theory(p, samples, m):
    """At each boundary, for each microbatch x and its gradient: b s h numbers of 8 bytes; with v chunks pv - 1 boundaries."""
    recording = trained(p, samples, m)
    ways = run_ways(p, m)
    boundaries = sum(p * v - 1 for v, _ in ways.values())
    one_step = 2 * samples * SEQUENCE * SHAPE.hidden * 8
    assert recording.sent_messages.sum() == STEPS * 2 * m * boundaries
    assert recording.sent_bytes.sum() == STEPS * one_step * boundaries
    chunked = sum(v - 1 for v, _ in ways.values())  # from the last rank to the first, and back
    expected = len(ways) * (torch.diag(torch.ones(p - 1), 1) + torch.diag(torch.ones(p - 1), -1))
    expected = expected + chunked * (torch.diag(torch.ones(p - 1), 1) + torch.diag(torch.ones(p - 1), -1))
    expected[p - 1, 0] += chunked
    expected[0, p - 1] += chunked
    assert recording.sent_messages.tolist() == (STEPS * m * expected).tolist()


@pytest.mark.parametrize("p,samples,m", [(2, 3, 2), (3, 5, 3), (4, 11, 8)])
def test_nothing_else_is_sent_but_the_tied_gradient_and_the_loss(p, samples, m):
    tied, number = SHAPE.vocabulary * SHAPE.hidden * 8, len(run_ways(p, m))
    assert sorted(map(tuple, trained(p, samples, m).collectives)) == sorted(
        [
            ("broadcast", 2, tied, number),  # before the first step
            ("all_reduce", 2, tied, number * STEPS),
            ("broadcast", p, 8, number * STEPS),  # the loss
        ]
    )


def flops_of(orders, m):
    def program():
        stages = pipeline.cut_into_stages(model_of(), dist.get_world_size())
        pipeline.run_schedule(stages[dist.get_rank()], orders, batch(0, 4, m), next_token_loss)

    return run(program, ranks=2).flops


def test_splitting_backward_computes_nothing_twice():
    assert flops_of(schedules.one_f_one_b(2, 4), 4) == flops_of(schedules.zero_bubble_h1(2, 4), 4)


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "ZB-H1", "interleaved"])
def test_every_action_is_labelled_in_the_order_of_the_table(name):
    p, m = 3, 6
    orders = tables(p, m)[name]
    recording = run(products, orders, m, 2 if name == "interleaved" else 1, ranks=p, shapes_only=True)
    for rank, events in enumerate(recording.events):
        computed = events[events["kind"] == COMPUTE]
        assert [recording.labels[label] for label in computed["label"]] == [str(one) for one in orders[rank]]


# ---- the replay and the table --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p,m", [(1, 3), (2, 1), (2, 4), (3, 3), (4, 8), (4, 2), (8, 16)])
def test_the_replay_of_a_recorded_run_is_the_table(p, m):
    for name, orders in tables(p, m).items():
        v = 2 if name == "interleaved" else 1
        recording = run(products, orders, m, v, ranks=p, shapes_only=True)
        table = schedules.timed(orders, 1, 1 if name == "ZB-H1" else 2)
        timeline = replay(recording, cluster())
        assert timeline.step_time == table.makespan
        found = {(s.rank, s.label): (s.start, s.end) for s in timeline.spans if s.kind == "compute"}
        assert found == {(cell.rank, str(cell.action)): (cell.time, cell.end) for cell in table.cells}


@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
@pytest.mark.parametrize("p,m", [(2, 5), (4, 8), (4, 2)])
def test_the_steps_of_the_lesson_replay_as_the_table(name, p, m):
    recording = run(products, name, m, 1, ranks=p, shapes_only=True)
    assert replay(recording, cluster()).step_time == schedules.timed(tables(p, m)[name], 1, 2).makespan


def test_the_numbers_of_the_textbook_come_out_of_a_recorded_run():
    for name, orders in (("GPipe", schedules.gpipe(4, 8)), ("1F1B", schedules.one_f_one_b(4, 8))):
        timeline = replay(run(products, orders, 8, 1, ranks=4, shapes_only=True), cluster())
        assert timeline.step_time == 33, name
        idle = sum(row[3] for row in timeline.breakdown())
        assert Fraction(idle / (4 * 33)).limit_denominator(100) == Fraction(3, 11)


@pytest.mark.parametrize("hop", [0.25, 1.0, 3.0])
@pytest.mark.parametrize("p,m", [(2, 4), (3, 6), (4, 8)])
def test_messages_that_take_time_are_those_of_the_table(p, m, hop):
    """A message takes a hop. Where that is longer than an action, ports that are still busy make the replay longer."""
    for name, orders in tables(p, m).items():
        recording = run(products, orders, m, 2 if name == "interleaved" else 1, ranks=p, shapes_only=True)
        table = schedules.timed(orders, 1, 1 if name == "ZB-H1" else 2, hop=hop)
        found = replay(recording, cluster(Link(1e30, hop))).step_time
        if hop <= 1:
            assert found == table.makespan
        else:
            assert found >= table.makespan


# ---- memory --------------------------------------------------------------------------------------------------------------------


def measured_peaks(way, m, shapes_only=False):
    def program():
        rank, p = dist.get_rank(), dist.get_world_size()
        v, step_by = run_ways(p, m)[way]
        stages = pipeline.cut_into_stages(model_of(), p * v)[rank::p]
        with pipeline.ActivationMeter(*stages) as meter:
            step_by(stages if v > 1 else stages[0], batch(0, 2 * m, m), next_token_loss)
        return meter.peak, meter.now

    results = run(program, ranks=4, shapes_only=shapes_only).results
    assert [now for _, now in results] == [0] * 4  # backward lets go of everything
    return [peak for peak, _ in results]


def test_bytes_kept_are_those_in_flight():
    """Bytes at the peak, divided by those of one microbatch: 8,8,8,8 under GPipe, 4,3,2,1 under 1F1B."""

    def activations(way, m):
        tokens = 2 * m * (SEQUENCE + 1) * 8  # the batch itself, which the embedding keeps a view of
        first, *others = measured_peaks(way, m)
        return [first - tokens, *others]

    one = activations("GPipe by hand", 1)
    for way, expected in (
        ("GPipe by hand", [8] * 4),
        ("1F1B by hand", [4, 3, 2, 1]),
        ("1F1B", [4, 3, 2, 1]),
        ("ZB-H1", [4, 3, 2, 1]),
    ):
        assert [peak / single for peak, single in zip(activations(way, 8), one)] == expected
    assert measured_peaks("1F1B by hand", 8, shapes_only=True) == measured_peaks("1F1B by hand", 8)


def test_what_is_being_sent_stays_in_memory_without_data():
    """Each send is of a tensor that nobody else holds: its memory must not be used again before the wait."""

    def program():
        other = 1 - dist.get_rank()
        sent = [dist.isend(torch.empty(4), other) for _ in range(20)]
        for _ in range(20):
            dist.recv(torch.empty(4), other)
        for handle in sent:
            handle.wait()

    assert run(program, ranks=2, shapes_only=True).sent_messages.tolist() == [[0, 20], [20, 0]]


# ---- long runs -----------------------------------------------------------------------------------------------------------------


LONG = replace(SHAPE, layers=2, hidden=16, feed_forward=64, heads=2, kv_heads=2)


def long_run(name, steps):
    """Live tensors after some of the steps; by how many bytes memory grew from the tenth step on; bytes that one step keeps."""
    import resource

    rank, p, m = dist.get_rank(), dist.get_world_size(), 4
    stage = pipeline.cut_into_stages(model_of(shape=LONG), p)[rank]
    ends = pipeline.first_and_last()
    orders = {"1F1B": schedules.one_f_one_b, "ZB-H1": schedules.zero_bubble_h1}[name](p, m)
    optimizer = programs.adamw(stage.parameters())
    live, before, losses = [], 0, []
    for step in range(steps):
        optimizer.zero_grad()
        with pipeline.ActivationMeter(stage) as meter:
            loss = pipeline.run_schedule(stage, orders, batch(0, 16 * m, m, LONG), next_token_loss)
        pipeline.sum_tied_gradients(stage, ends)
        optimizer.step()
        losses.append(pipeline.loss_everywhere(loss).item())
        if step % 50 == 10:
            gc.collect()
            live.append(sum(isinstance(one, torch.Tensor) for one in gc.get_objects()))
            before = before or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return live, grown * (1 if sys.platform == "darwin" else 1024), meter.peak, losses


@pytest.mark.skipif(sys.platform == "win32", reason="the module resource is not on Windows")
@pytest.mark.parametrize("name", ["1F1B", "ZB-H1"])
def test_200_steps_keep_nothing_and_learn(name):
    for live, grown, one_step, losses in run(long_run, name, 200, ranks=2, timeout=120).results:
        assert len(live) == 4 and max(live) - min(live) <= 2  # one more a step would be 150
        print(f"{name}: memory grew by {grown:,} bytes in 190 steps, each of which keeps {one_step:,} (measured)")
        assert grown < 190 * one_step / 4  # the recording grows with the steps, by less than a leak of activations would
        assert losses[-1] < losses[0] / 2
