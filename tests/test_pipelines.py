"""Pipelines that nobody has run: the same events as a recorded run, the table's own times, work and memory of real shapes."""

import random
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from lessons_lib import pipelines, replay, shapes
from lessons_lib.hardware import Cluster, Device, Link
from lessons_lib.parallel import schedules
from lessons_lib.parallel.schedules import ScheduleError, gpipe, interleaved, one_f_one_b, timed, zero_bubble_h1
from lessons_lib.pipelines import (
    balanced_layers,
    boundary_bytes,
    layers_per_stage,
    memory_of_ranks,
    parameters_of_stages,
    record_pipeline,
    work,
    work_from,
    work_of_stages,
)  # fmt: skip
from lessons_lib.recording import COLLECTIVE, COMPUTE, Recording

ROOT = Path(__file__).resolve().parents[1]
GPT, LLAMA = shapes.GPT3_175B, shapes.LLAMA3_70B


def cluster(flops=1.0, link=None):
    return Cluster(Device(flops, 1e30, 1e30, 1.0), devices_per_node=64, intra_node=link or Link(1e30, 0.0))


def every(p, m):
    found = [gpipe(p, m), one_f_one_b(p, m), zero_bubble_h1(p, m), schedules.greedy(p, m, 2, split=True)]
    return found + ([interleaved(p, m, v) for v in (2, 3)] if m % p == 0 else [])


# ---- times -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p,m", [(1, 1), (1, 4), (2, 1), (2, 6), (3, 2), (3, 9), (4, 8), (8, 32)])
@pytest.mark.parametrize("f,b,w", [(1, 1, 1), (1, 2, 1), (3, 4, 2)])
def test_the_replay_is_the_table(p, m, f, b, w):
    for orders in every(p, m):
        table = timed(orders, f, b, w)
        timeline = replay(record_pipeline(orders, f, b, w), cluster())
        assert timeline.step_time == table.makespan
        found = {(s.rank, s.label): (s.start, s.end) for s in timeline.spans if s.kind == "compute"}
        assert found == {(cell.rank, str(cell.action)): (cell.time, cell.end) for cell in table.cells}


def test_the_numbers_of_the_textbook():
    for make in (gpipe, one_f_one_b):
        assert replay(record_pipeline(make(8, 32), 1, 1), cluster()).step_time == 78
        assert replay(record_pipeline(make(4, 8), 1, 1), cluster()).step_time == 22
        assert replay(record_pipeline(make(4, 8), 1, 2), cluster()).step_time == 33


@pytest.mark.parametrize("seed", range(5))
def test_uneven_stages_and_messages_that_take_time(seed):
    """A message that takes no longer than the shortest action arrives as in the table: hop = latency + bytes / bandwidth."""
    draw = random.Random(seed)
    p, m = draw.choice([(2, 5), (3, 6), (4, 8)])
    for orders in every(p, m):
        stages = p * (max(one.chunk for one in orders[0]) + 1)
        f, b, w = ([draw.randint(4, 9) for _ in range(stages)] for _ in range(3))
        found = replay(record_pipeline(orders, f, b, w, message_bytes=3), cluster(link=Link(4.0, 1.25))).step_time
        table = timed(orders, f, b, w, hop=Fraction(2))
        assert found >= table.makespan
        if schedules.recognise(orders) in ("GPipe", "1F1B", "ZB-H1"):
            assert found == table.makespan


def test_a_real_run_and_one_that_nobody_ran_are_the_same_events():
    torch = pytest.importorskip("torch")
    sys.path.insert(0, str(ROOT / "tests" / "parallel"))
    try:
        import pipeline_programs as programs
    finally:
        sys.path.pop(0)
    from lessons_lib import run

    nbytes = programs.WIDTH**2 * torch.empty(()).element_size()
    links = [Link(1e30, 0.0), Link(nbytes / 0.2, 0.1), Link(nbytes, 5.0)]
    for p, m in ((1, 3), (2, 1), (2, 5), (4, 8)):
        for orders in every(p, m):
            v = max(one.chunk for one in orders[0]) + 1
            real = run(programs.products, orders, m, v, ranks=p, shapes_only=True)
            made = record_pipeline(orders, *work_from(real), message_bytes=nbytes)
            for a, b in zip(real.events, made.events):
                for column in ("kind", "blocking", "peer", "tag", "nbytes", "target"):
                    assert a[column].tolist() == b[column].tolist(), column
                assert [real.labels[n] if n >= 0 else "" for n in a["label"]] == [
                    made.labels[n] if n >= 0 else "" for n in b["label"]
                ]
            for link in links:
                there = cluster(programs.PRODUCT, link)
                assert replay(real, there).step_time == replay(made, there).step_time


def test_work_from_a_real_run_prices_another_number_of_microbatches():
    pytest.importorskip("torch")
    sys.path.insert(0, str(ROOT / "tests" / "parallel"))
    try:
        import pipeline_programs as programs
    finally:
        sys.path.pop(0)
    from lessons_lib import run

    few = run(programs.products, zero_bubble_h1(3, 2), 2, 1, ranks=3, shapes_only=True)
    forward, backward, weight = work_from(few)
    assert [one.flops for one in (*forward, *backward, *weight)] == [programs.PRODUCT] * 9
    many = record_pipeline(zero_bubble_h1(3, 12), forward, backward, weight)
    assert replay(many, cluster(programs.PRODUCT)).step_time == timed(zero_bubble_h1(3, 12)).makespan


@pytest.mark.parametrize("shape", [shapes.TINY, shapes.TINY_LLAMA, replace(shapes.TINY, tied=False, feed_forward=96)])
@pytest.mark.parametrize("split", [False, True])
def test_work_from_a_shape_has_the_flops_of_a_real_run(shape, split):
    torch = pytest.importorskip("torch")
    import torch.distributed as dist

    from lessons_lib import run
    from lessons_lib.models import Transformer, next_token_loss
    from lessons_lib.parallel import pipeline

    def program():
        rank, p = dist.get_rank(), dist.get_world_size()
        stage = pipeline.cut_into_stages(Transformer(shape), p)[rank]
        tokens = torch.zeros(6, 33, dtype=torch.int64)
        microbatches = pipeline.split_into_microbatches(tokens[:, :-1], tokens[:, 1:], 2)
        orders = (zero_bubble_h1 if split else one_f_one_b)(p, 2)
        pipeline.run_schedule(stage, orders, microbatches, next_token_loss)

    real = work_from(run(program, ranks=2, shapes_only=True))
    predicted = work_of_stages(shape, 2, 32, 3, split=split)
    assert [[one.flops for one in part] for part in real] == [[one.flops for one in part] for part in predicted]


def test_what_is_recorded_can_be_counted_saved_and_loaded(tmp_path):
    orders = interleaved(4, 8, 2)
    sizes = [100] * 7 + [60]
    recording = record_pipeline(orders, 3, 6, message_bytes=sizes, tied_bytes=1000)
    assert recording.flops == [8 * 2 * 9] * 4
    assert recording.sent_messages.sum() == 2 * 8 * 7 and recording.sent_bytes.sum() == 2 * sum(sizes) * 7
    assert [tuple(row) for row in recording.collectives] == [("all_reduce", 2, 1000, 1)]
    ends = [[e["kind"] for e in events].count(COLLECTIVE) for events in recording.events]
    assert ends == [1, 0, 0, 1]
    recording.save(tmp_path / "pipeline.json")
    again = Recording.load(tmp_path / "pipeline.json")
    there = cluster(link=Link(100.0, 0.5))
    assert replay(again, there).step_time == replay(recording, there).step_time
    assert record_pipeline(gpipe(1, 2), 1, 1, tied_bytes=5).collectives == []


def test_the_tied_gradient_is_added_up_at_the_end():
    there = cluster(link=Link(100.0, 0.5))
    without, tied = (replay(record_pipeline(one_f_one_b(4, 4), 10, 20, tied_bytes=n), there).step_time for n in (0, 1000))
    assert tied - without == pytest.approx(2 * (0.5 + 500 / 100))  # a ring of two: the last rank is there long before


# ---- work of real shapes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [GPT, LLAMA, shapes.TINY, shapes.TINY_LLAMA])
@pytest.mark.parametrize("stages", [1, 3, 4])
@pytest.mark.parametrize("split", [False, True])
def test_work_adds_up_to_the_model(shape, stages, split):
    s, b = 64, 3
    forward, backward, weight = work_of_stages(shape, stages, s, b, split=split)
    total = [sum(one.flops for one in works) for works in (forward, backward, weight)]
    assert total[0] == b * s * shapes.forward_flops(shape, s)
    assert sum(total) == b * s * shapes.training_flops(shape, s)
    matrices = shape.layers * sum(shapes.layer_weights(shape).values()) + shape.hidden * shape.vocabulary
    assert total[2] == (2 * b * s * matrices if split else 0)


def test_the_logits_are_on_the_last_stage_and_recomputation_is_in_backward():
    forward, backward, _ = work_of_stages(LLAMA, 8, 4096)
    assert forward[-1].flops - forward[0].flops == 4096 * shapes.logits_flops(LLAMA)
    assert [one.flops for one in backward] == [2 * one.flops for one in forward]
    full = work_of_stages(LLAMA, 8, 4096, recompute="full")[1]
    assert [a.flops - b.flops for a, b in zip(full, backward)] == [forward[0].flops] * 8
    selective = work_of_stages(LLAMA, 8, 4096, recompute="selective")[1]
    assert selective[0].flops - backward[0].flops == 4096 * 10 * 4 * 4096 * LLAMA.hidden
    assert work(10).scaled(2.5).flops == 25 and (work(10) + work(5)).flops == 15


def test_boundary_bytes_and_the_pace_of_a_slow_link():
    assert boundary_bytes(GPT, 2048, 2) == 2 * 2048 * 12288 * 2
    forward, backward, _ = work_of_stages(GPT, 8, 2048)
    recording = record_pipeline(one_f_one_b(8, 32), forward, backward, message_bytes=boundary_bytes(GPT, 2048))
    device = Device(1e15, 1e30, 1e30, 0.5)
    fast, slow = (
        replay(recording, Cluster(device, devices_per_node=8, intra_node=Link(rate, 0.0))).step_time for rate in (1e30, 1e5)
    )
    ideal = 32 * max(f.flops + b.flops for f, b in zip(forward, backward)) / 5e14
    assert fast == pytest.approx(ideal * (1 + 7 / 32), rel=0.01)  # the last stage is 3% slower than the others
    # every boundary's 64 messages pass one after the other in each direction
    assert slow > 32 * boundary_bytes(GPT, 2048) / 1e5


def test_layers_are_balanced_against_the_logits():
    assert balanced_layers(GPT, 8, 2048) == [12] * 8  # its logits are a third of a layer
    even, balanced = layers_per_stage(LLAMA, 8), balanced_layers(LLAMA, 8, 4096)
    assert even == [10] * 8 and sum(balanced) == 80 and balanced[-1] == 9 and max(balanced) == 11

    def slowest(layers):
        return max(one.flops for one in work_of_stages(LLAMA, 8, 4096, layers=layers)[0])

    assert slowest(balanced) < slowest(even)
    tiny = replace(shapes.TINY, layers=5)
    best = min(slowest_of(tiny, [a, b, 5 - a - b]) for a in range(6) for b in range(1, 6 - a) if a + b <= 5)
    assert slowest_of(tiny, balanced_layers(tiny, 3, 64)) == best


def slowest_of(shape, layers):
    return max(one.flops for one in work_of_stages(shape, len(layers), 64, layers=layers)[0])


# ---- memory --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [GPT, LLAMA, shapes.TINY])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_parameters_add_up_to_the_model_and_a_second_copy_of_what_is_tied(shape, stages):
    copies = shape.vocabulary * shape.hidden if shape.tied and stages > 1 else 0
    assert sum(parameters_of_stages(shape, stages)) == shapes.total_parameters(shape) + copies


def test_memory_in_flight_is_that_of_the_papers():
    """arXiv:2205.05198, table 2 and section 4.2.3; arXiv:2104.04473, section 2.2: 1 + (p-1)/(pv) times under interleaving."""
    s, b, h = 2048, 1, GPT.hidden
    edge = 4 * b * s * (h + GPT.vocabulary)
    layer = {"none": s * b * (34 * h + 5 * GPT.heads * s), "selective": 34 * s * b * h, "full": 2 * s * b * h}
    for recompute, one in layer.items():
        found = memory_of_ranks(GPT, one_f_one_b(8, 32), s, b, recompute=recompute)
        assert [rank.activations for rank in found] == [12 * one * (8 - r) + edge * (r == 7) for r in range(8)]
        gpipe_too = memory_of_ranks(GPT, gpipe(8, 32), s, b, recompute=recompute)
        assert [rank.activations for rank in gpipe_too] == [32 * (12 * one + edge * (r == 7)) for r in range(8)]
    plain, chunked = (memory_of_ranks(GPT, orders, s)[0].activations for orders in (one_f_one_b(8, 32), interleaved(8, 32, 4)))
    assert Fraction(chunked, plain) == 1 + Fraction(7, 8 * 4)


@pytest.mark.parametrize("recompute, one", [("selective", 34), ("full", 2)])
def test_what_waits_for_w_is_each_products_input_and_the_gradient_of_its_output(recompute, one):
    """A layer of a GPT: inputs of h, h, h, 4h and outputs of 3h, h, 4h, h, of 2 bytes: 32 sbh. Counted action by action."""
    s, h, orders = 2048, GPT.hidden, zero_bubble_h1(8, 32)
    for rank, found in enumerate(memory_of_ranks(GPT, orders, s, recompute=recompute)[:-1]):
        order, most = [one_action.kind for one_action in orders[rank]], 0
        for done in range(1, len(order) + 1):
            f, b, w = (order[:done].count(kind) for kind in "FBW")
            most = max(most, (f - b) * one + (b - w) * (14 + 18))
        assert found.activations == 12 * most * s * h
    last = memory_of_ranks(GPT, zero_bubble_h1(8, 8), s, recompute=recompute)[-1].activations
    assert last > memory_of_ranks(GPT, one_f_one_b(8, 8), s, recompute=recompute)[-1].activations


def test_states_by_recipe():
    found = memory_of_ranks(GPT, one_f_one_b(8, 32), 2048)
    assert [one.parameters for one in found] == parameters_of_stages(GPT, 8)
    assert all(one.states == 16 * one.parameters and one.total == one.states + one.activations for one in found)
    assert [one.layers for one in found] == [12] * 8
    other = memory_of_ranks(GPT, one_f_one_b(8, 32), 2048, recipe="mixed precision, Adam, 32-bit gradients")
    assert other[0].states == 18 * found[0].parameters
    both_ends_here = memory_of_ranks(shapes.TINY, interleaved(1, 2, 2), 64)
    assert both_ends_here[0].parameters == shapes.total_parameters(shapes.TINY)
    assert memory_of_ranks(LLAMA, one_f_one_b(8, 8), 4096)[0].activations > 0


# ---- quick, and without torch ----------------------------------------------------------------------------------------------------


def test_it_works_where_torch_is_not_installed():
    code = (
        "import sys\nsys.modules['torch'] = None\n"
        "from lessons_lib import pipelines, replay\nfrom lessons_lib.parallel import schedules\n"
        "from lessons_lib.hardware import Cluster, H100\n"
        "print(replay(pipelines.record_pipeline(schedules.one_f_one_b(4, 8), 1e12, 2e12), Cluster(H100)).step_time > 0)"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ran.stdout == "True\n", ran.stderr


def test_costs_that_change_do_not_change_an_earlier_recording():
    first = record_pipeline(one_f_one_b(2, 3), 1, 2, message_bytes=10)
    before = [events.copy() for events in first.events]
    second = record_pipeline(one_f_one_b(2, 3), 5, 7, message_bytes=[1, 2, 3], tied_bytes=9)
    assert all(np.array_equal(a, b) for a, b in zip(first.events, before))
    assert first.flops == [9, 9] and second.flops == [36, 36]
    assert sum(int((events["kind"] == COMPUTE).sum()) for events in second.events) == 12


# ---- bad input -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [-1, True, None, "1", float("nan"), float("inf")])
def test_work_that_is_none_is_refused(bad):
    with pytest.raises(ValueError, match="The work of an action is flops=.* but must be a finite number, 0 or more"):
        record_pipeline(gpipe(2, 2), bad, 1)
    with pytest.raises(ValueError, match="The work of an action is nbytes="):
        work(1, bad)
    with pytest.raises((TypeError, ValueError), match="message_bytes (is|must be)"):
        record_pipeline(gpipe(2, 2), 1, 1, message_bytes=bad)


def test_other_bad_input_is_refused_by_a_sentence():
    for call, words in (
        (lambda: record_pipeline(None, 1, 1), "Orders are a list"),
        (lambda: record_pipeline(["F0 B0", "F0"], 1, 1), "Rank 1 never runs B0"),
        (lambda: record_pipeline(gpipe(2, 2), [1, 2, 3], 1), "forward has 3 entries, but there are 2 stages"),
        (lambda: record_pipeline(zero_bubble_h1(2, 2), 1, 1, [1]), "weight has 1 entries"),
        (
            lambda: record_pipeline(gpipe(2, 2), 1, 1, message_bytes=[1]),
            "message_bytes has 1 entries, but there are 2 microbatches",
        ),
        (lambda: record_pipeline(gpipe(2, 2), 1, 1, tied_bytes=-1), "tied_bytes is -1"),
        (lambda: work(1).scaled(-1), "The factor is -1"),
        (lambda: work_from(None), "A Recording is needed"),
        (lambda: work_from(Recording(1, [np.zeros(0)], [np.zeros(0)], [], [], [], [], [])), 'no parts labelled "F0" and "B0"'),
        (lambda: work_of_stages(None, 2, 64), "A shape is needed"),
        (lambda: work_of_stages(GPT, 97, 64), "96 layers cannot fill 97 stages"),
        (lambda: work_of_stages(GPT, 0, 64), "stages is 0"),
        (lambda: work_of_stages(GPT, 2, 5000), "sequence .* is 5,000"),
        (lambda: work_of_stages(GPT, 2, 64, 0), "microbatch .* is 0"),
        (lambda: work_of_stages(GPT, 2, 64, recompute="some"), "recompute must be one of 'none', 'selective', 'full', not 'some'"),
        (lambda: work_of_stages(GPT, 2, 64, split=1), "split must be True or False"),
        (lambda: work_of_stages(GPT, 2, 64, layers=[1, 2]), "are 3 layers in all, but the model has 96"),
        (lambda: balanced_layers(GPT, 97, 64), "The number of stages is 97"),
        (lambda: memory_of_ranks(GPT, gpipe(2, 2), 64, recipe="none"), "recipe must be one of 'mixed precision, Adam'"),
        (lambda: memory_of_ranks(GPT, gpipe(2, 2), 64, recompute=None), "recompute must be one of"),
        (lambda: boundary_bytes(GPT, True), "sequence .* must be a whole number"),
    ):
        with pytest.raises((TypeError, ValueError, ScheduleError), match=words):
            call()
    assert set(pipelines.__all__) <= set(dir(pipelines))
