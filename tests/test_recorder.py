"""What is recorded: every spelling of every operation, counts and bytes against theory, values against one process."""

import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from lessons_lib import Cluster, Device, Link, replay, run
from lessons_lib.recording import COLLECTIVE, COMPUTE, RECV, SEND, WAIT

SIZES = random.Random(7).sample(range(1, 400), 3)


def collectives(recording) -> dict:
    """{(kind, group size, bytes): count}"""
    return {row[:3]: row[3] for row in recording.collectives}


def kinds(recording, rank=0) -> list:
    """The rank's events as letters: C compute, S send, R receive, W wait; a collective by its name."""
    names = {COMPUTE: "C", SEND: "S", RECV: "R", WAIT: "W"}
    return [names.get(e["kind"]) or recording.ops[e["op"]] for e in recording.events[rank] if e["kind"] != COMPUTE]


# ---- every operation -------------------------------------------------------------------------------------------------


def all_spellings(k):
    """Each operation once per spelling, k float32 elements a rank; asserts the values, returns the calls made."""
    rank, n = dist.get_rank(), dist.get_world_size()
    calls = []

    def fresh(size=k, value=None):
        return torch.full((size,), float(rank + 1 if value is None else value))

    def done(kind, nbytes, *handles):
        for handle in handles:
            handle.wait()
        calls.append((kind, n, nbytes))

    total, item = float(n * (n + 1) // 2), 4 * k
    x = fresh()
    dist.all_reduce(x)
    done("all_reduce", item)
    assert torch.equal(x, fresh(value=total))
    x = fresh()
    done("all_reduce", item, dist.all_reduce(x, op=dist.ReduceOp.MAX, async_op=True))
    assert torch.equal(x, fresh(value=n))
    x = fresh()
    dist.broadcast(x, src=n - 1)
    done("broadcast", item)
    assert torch.equal(x, fresh(value=n))
    x = fresh()
    dist.reduce(x, dst=0)
    done("reduce", item)
    assert rank or torch.equal(x, fresh(value=total))
    pieces = [torch.zeros(k) for _ in range(n)]
    dist.all_gather(pieces, fresh())
    done("all_gather", item * n)
    assert torch.equal(torch.cat(pieces), torch.arange(1.0, n + 1).repeat_interleave(k))
    whole = torch.zeros(n * k)
    dist.all_gather_single(whole, fresh())
    done("all_gather", item * n)
    assert torch.equal(whole, torch.cat(pieces))
    x = torch.zeros(k)
    dist.reduce_scatter(x, [fresh(value=i) for i in range(n)])
    done("reduce_scatter", item * n)
    assert torch.equal(x, fresh(value=rank * n))
    x = torch.zeros(k)
    done("reduce_scatter", item * n, dist.reduce_scatter_single(x, whole, async_op=True))
    assert torch.equal(x, fresh(value=n * (rank + 1)))
    dist.gather(fresh(), [torch.zeros(k) for _ in range(n)] if rank == 0 else None, dst=0)
    done("gather", item * n)
    x = torch.zeros(k)
    dist.scatter(x, [fresh(value=i) for i in range(n)] if rank == 1 % n else None, src=1 % n)
    done("scatter", item * n)
    assert torch.equal(x, fresh(value=rank))
    out = torch.zeros(n * k)
    dist.all_to_all_single(out, fresh(n * k))
    done("all_to_all", item * n)
    assert torch.equal(out, whole)
    outs = [torch.zeros(k) for _ in range(n)]
    dist.all_to_all(outs, [fresh() for _ in range(n)])
    done("all_to_all", item * n)
    assert torch.equal(torch.cat(outs), whole)
    dist.barrier()
    done("barrier", 0)
    dist.monitored_barrier()
    done("barrier", 0)
    return calls


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("ranks,size", [(2, SIZES[0]), (3, SIZES[1]), (4, SIZES[2])])
def test_every_collective_is_recorded_once_with_its_bytes(ranks, size):
    recording = run(all_spellings, size, ranks=ranks)
    calls = recording.results[0]
    assert [tuple(c) for c in recording.results[-1]] == [tuple(c) for c in calls]
    expected = {}
    for call in calls:
        expected[call] = expected.get(call, 0) + 1
    assert collectives(recording) == expected
    for rank in range(ranks):
        assert [k for k in kinds(recording, rank) if k != "W"] == [c[0] for c in calls]


def test_older_names_are_recorded_too():
    def program():
        n, rank = dist.get_world_size(), dist.get_rank()
        x, whole = torch.full((5,), float(rank)), torch.zeros(5 * n)
        dist.all_gather_into_tensor(whole, x)
        dist.reduce_scatter_tensor(x, whole)
        group = dist.group.WORLD
        group.allreduce(x).wait()
        group.allreduce([x], dist.ReduceOp.SUM).wait()
        group._allgather_base(whole, x).wait()
        group._reduce_scatter_base(x, whole).wait()
        group.broadcast(x, 0).wait()
        group.barrier().wait()

    got = collectives(run(program, ranks=3))
    pieces = {("all_gather", 3, 60): 2, ("reduce_scatter", 3, 60): 2}
    assert got == {**pieces, ("all_reduce", 3, 20): 2, ("broadcast", 3, 20): 1, ("barrier", 3, 0): 1}


def test_coalesced_and_functional_collectives():
    def program():
        import torch.distributed._functional_collectives as functional
        from torch.distributed.distributed_c10d import _coalescing_manager

        n, rank = dist.get_world_size(), dist.get_rank()
        a, b = torch.full((3,), float(rank)), torch.full((5,), 1.0)
        with _coalescing_manager():
            dist.all_reduce(a)
            dist.all_reduce(b)
        c = functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD) * 1
        d = functional.all_gather_single(torch.full((2,), float(rank)), 0, dist.group.WORLD) * 1
        e = functional.reduce_scatter_single(torch.ones(2 * n), "sum", 0, dist.group.WORLD) * 1
        f = functional.all_to_all_single(torch.full((n,), float(rank)), None, None, dist.group.WORLD) * 1
        return [t.tolist() for t in (a, b, c, d, e, f)]

    recording = run(program, ranks=3)
    assert recording.results[1] == [[3.0] * 3, [3.0] * 5, [3.0] * 4, [0.0, 0, 1, 1, 2, 2], [3.0, 3.0], [0.0, 1.0, 2.0]]
    reduced = {("all_reduce", 3, 32): 1, ("all_reduce", 3, 16): 1}  # the coalesced two are one operation of 8 elements
    pieces = {("all_gather", 3, 24): 1, ("reduce_scatter", 3, 24): 1, ("all_to_all", 3, 12): 1}
    assert collectives(recording) == {**reduced, **pieces}


def test_object_collectives():
    def program():
        n, rank = dist.get_world_size(), dist.get_rank()
        gathered = [None] * n
        dist.all_gather_object(gathered, {"rank": rank, "text": "x" * rank})
        box = ["from zero", 5] if rank == 0 else [None, None]
        dist.broadcast_object_list(box, src=0)
        mine = [None]
        dist.scatter_object_list(mine, [10, 11, 12] if rank == 0 else [None] * 3, src=0)
        collected = [None] * n if rank == 0 else None
        dist.gather_object(rank * 2, collected, dst=0)
        if rank == 0:
            dist.send_object_list([{"a": 1}], dst=1)
        letter = [None]
        if rank == 1:
            dist.recv_object_list(letter, src=0)
        return gathered, box, mine, collected, letter

    recording = run(program, ranks=3)
    gathered, box, mine, collected, letter = recording.results[1]
    assert gathered == [{"rank": r, "text": "x" * r} for r in range(3)]
    assert box == ["from zero", 5] and mine == [11] and letter == [{"a": 1}]
    assert recording.results[0][3] == [0, 2, 4]
    assert {"all_gather", "broadcast", "scatter", "gather"} <= {row[0] for row in recording.collectives}
    assert recording.sent_messages[0, 1] == 2 and recording.sent_messages.sum() == 2


# ---- messages -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_messages_of_a_ring(ranks):
    def program(sizes):
        rank, n = dist.get_rank(), dist.get_world_size()
        got = []
        for size in sizes:
            x = torch.full((size,), float(rank))
            y = torch.empty(size)
            handle = dist.isend(x, (rank + 1) % n)
            dist.recv(y, (rank - 1) % n)
            handle.wait()
            ops = [dist.P2POp(dist.isend, x, (rank + 1) % n, tag=4), dist.P2POp(dist.irecv, y, (rank - 1) % n, tag=4)]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            got.append(y[0].item())
        return got

    recording = run(program, SIZES, ranks=ranks)
    expected = np.zeros((ranks, ranks), dtype=int)
    for rank in range(ranks):
        expected[rank, (rank + 1) % ranks] += 2 * 4 * sum(SIZES)
        assert recording.results[rank] == [(rank - 1) % ranks] * len(SIZES)
    assert (recording.sent_bytes == expected).all()
    assert (recording.sent_messages == 2 * len(SIZES) * (expected > 0)).all()


def test_a_receive_from_any_rank_is_recorded_with_its_sender():
    def program():
        if dist.get_rank() == 0:
            got = []
            for _ in range(2):
                t = torch.zeros(3)
                got.append((dist.recv(t), t[0].item()))
            return sorted(got)
        dist.send(torch.full((3,), float(dist.get_rank())), 0)

    recording = run(program, ranks=3)
    assert recording.results[0] == [(1, 1.0), (2, 2.0)]
    assert sorted(int(e["peer"]) for e in recording.events[0] if e["kind"] == RECV) == [1, 2]


def test_sub_groups_and_meshes():
    def program():
        from torch.distributed.device_mesh import init_device_mesh

        rank = dist.get_rank()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        x, y = torch.full((6,), float(rank)), torch.full((6,), float(rank))
        dist.all_reduce(x, group=mesh["data"].get_group())
        dist.all_reduce(y, group=mesh["tensor"].get_group())
        odd = dist.new_group([1, 3], backend="gloo")
        z = torch.full((2,), float(rank))
        if rank in (1, 3):
            dist.broadcast(z, src=3, group=odd)
            assert dist.get_backend(odd) == "gloo"
        one, _ = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])
        dist.all_reduce(z, group=one)
        return x[0].item(), y[0].item(), z[0].item()

    recording = run(program, ranks=4)
    assert recording.results == [(2.0, 1.0, 3.0), (4.0, 1.0, 5.0), (2.0, 5.0, 5.0), (4.0, 5.0, 3.0)]
    assert collectives(recording) == {("all_reduce", 2, 24): 4, ("broadcast", 2, 8): 1, ("all_reduce", 2, 8): 2}
    assert {(0, 2), (1, 3), (0, 1), (2, 3), (0, 3), (1, 2)} <= set(recording.groups)


def test_groups_of_the_same_ranks_are_told_apart():
    """Each has its own order of operations: interleaving them differently on different ranks is allowed."""

    def program():
        one, two = dist.new_group([0, 1]), dist.new_group([0, 1])
        a, b = torch.full((3,), 1.0), torch.full((5,), 10.0)
        first, second = ((a, one), (b, two)) if dist.get_rank() == 0 else ((b, two), (a, one))
        handles = [dist.all_reduce(t, group=g, async_op=True) for t, g in (first, second)]
        for handle in handles:
            handle.wait()
        return a[0].item(), b[0].item()

    recording = run(program, ranks=2)
    assert recording.results == [(2.0, 20.0)] * 2 and recording.groups.count((0, 1)) >= 2
    assert collectives(recording) == {("all_reduce", 2, 12): 1, ("all_reduce", 2, 20): 1}
    link = Link(1e6, 1e-3)
    step = replay(recording, Cluster(Device(1e30, 1, 1e30), 1, 2, link)).step_time
    assert step == pytest.approx(2 * (2 * 1e-3) + (12 + 20) / 1e6, rel=1e-9)


# ---- blocking, overlap, labels --------------------------------------------------------------------------------------------


def test_blocking_and_overlapped_calls_differ_in_the_record():
    def program():
        t = torch.ones(1000)
        dist.all_reduce(t)
        handle = dist.all_reduce(t, async_op=True)
        torch.ones(50, 50) @ torch.ones(50, 50)
        handle.wait()
        late = dist.all_reduce(t, async_op=True)
        late.wait()

    recording = run(program, ranks=2)
    events = [e for e in recording.events[0]]
    calls = [e for e in events if e["kind"] == COLLECTIVE]
    assert [bool(e["blocking"]) for e in calls] == [True, False, True]
    (wait,) = [e for e in events if e["kind"] == WAIT]
    assert events[wait["target"]]["kind"] == COLLECTIVE and not events[wait["target"]]["blocking"]
    between = events[wait["target"] + 1]
    assert between["kind"] == COMPUTE


def test_labels_name_the_parts_and_nest():
    def program():
        with torch.profiler.record_function("forward 3"):
            x = torch.ones(4, 4) @ torch.ones(4, 4)
            with torch.profiler.record_function("inner"):
                dist.all_reduce(x)
            x + 1
        x * 2

    recording = run(program, ranks=2)
    named = [(recording.labels[e["label"]] if e["label"] >= 0 else "", int(e["kind"])) for e in recording.events[1]]
    assert named == [("forward 3", COMPUTE), ("inner", COLLECTIVE), ("forward 3", COMPUTE), ("", COMPUTE)]


# ---- operators ----------------------------------------------------------------------------------------------------------


def network_step(width, batch):
    torch.manual_seed(width)
    model = torch.nn.Sequential(
        torch.nn.Linear(width, 3 * width), torch.nn.GELU(), torch.nn.LayerNorm(3 * width), torch.nn.Linear(3 * width, 2),
    )  # fmt: skip
    image = torch.nn.Conv2d(2, 4, 3)(torch.randn(1, 2, 8, 8)).mean()
    (model(torch.randn(batch, width)).square().mean() + image).backward()


@pytest.mark.parametrize("width,batch", [(SIZES[0], 3), (SIZES[1], 5)])
def test_flops_are_those_that_pytorch_counts(width, batch):
    with FlopCounterMode(display=False) as counter:
        network_step(width, batch)
    recording = run(network_step, width, batch, ranks=2)
    assert recording.flops == [counter.get_total_flops()] * 2


def test_bytes_of_an_operator_are_what_it_reads_and_writes():
    def program():
        a, b = torch.empty(10, 20), torch.empty(20, 30)
        a @ b
        a.t()[3:]  # views move nothing
        a.add_(1)
        a.copy_(torch.empty(10, 20))
        a.zero_()

    recording = run(program, ranks=1)
    assert {(o.name, o.flops, o.nbytes) for o in recording.operators} == {
        ("mm", 2 * 10 * 20 * 30, 4 * (200 + 600 + 300)),
        ("add_", 0, 4 * (200 + 200)),
        ("copy_", 0, 4 * (200 + 200)),
        ("zero_", 0, 4 * 200),
    }


def test_attention_is_counted_forward_and_backward():
    def program(b, h, s, d):
        q, k, v = (torch.randn(b, h, s, d, requires_grad=True) for _ in range(3))
        torch.nn.functional.scaled_dot_product_attention(q, k, v).sum().backward()

    b, h, s, d = 2, 3, 16, 8
    recording = run(program, b, h, s, d, ranks=1)
    product = 2 * b * h * s * s * d  # one of the batched products of attention
    # forward: scores and values; backward: the scores again, and two products each for values and for scores
    assert recording.flops == [(2 + 5) * product]


def test_composite_operators_are_counted_under_inference_mode():
    def program():
        with torch.inference_mode():
            torch.nn.Linear(6, 4)(torch.ones(5, 6))
            torch.matmul(torch.ones(2, 3, 4), torch.ones(2, 4, 5))

    assert run(program, ranks=1).flops == [2 * 5 * 6 * 4 + 2 * 2 * 3 * 4 * 5]


def test_questions_about_a_tensor_are_answered_and_not_counted():
    def program():
        x = torch.ones(2, 3)
        before = x + 1
        return x.is_pinned(), x.is_contiguous(), x.stride(), before.storage_offset()

    recording = run(program, ranks=1)
    assert recording.results == [(False, True, (3, 1), 0)]
    assert {o.name for o in recording.operators} <= {"ones", "fill_", "add"}
    assert run(program, ranks=1, shapes_only=True).results == recording.results


def test_a_distributed_checkpoint_is_written_and_read(tmp_path):
    def program():
        from torch.distributed import checkpoint

        layer = torch.nn.Linear(3, 2)
        checkpoint.save({"layer": layer.state_dict()}, checkpoint_id=str(tmp_path))
        state = {"layer": {name: torch.zeros_like(value) for name, value in layer.state_dict().items()}}
        checkpoint.load(state, checkpoint_id=str(tmp_path))
        return all(torch.equal(state["layer"][name], value) for name, value in layer.state_dict().items())

    assert run(program, ranks=2).results == [True, True]


def test_a_wait_is_labelled_by_the_part_of_the_program_that_waits():
    def program():
        with torch.profiler.record_function("start"):
            handle = dist.all_reduce(torch.ones(4), async_op=True)
        with torch.profiler.record_function("finish"):
            handle.wait()
        with torch.profiler.record_function("both"):
            dist.all_reduce(torch.ones(4), async_op=True).wait()

    recording = run(program, ranks=2)
    for events in recording.events:
        labels = [recording.labels[event["label"]] for event in events if event["kind"] in (COLLECTIVE, WAIT)]
        assert labels == ["start", "finish", "both"]  # the last one is a blocking call: a single event
