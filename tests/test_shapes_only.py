"""Programs of real size recorded without data: the same counts as a real run, quickly, and clear errors where values are read."""

import io

import pytest
import torch
import torch.distributed as dist

from lessons_lib import Deadlock, Mismatch, RunError, replay, run
from lessons_lib.hardware import H100, Cluster
from lessons_lib.recording import COMPUTE, EVENT


class AllReduceForward(torch.autograd.Function):
    """g of Megatron-LM: all-reduce forward, identity backward."""

    @staticmethod
    def forward(ctx, x):
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class AllReduceBackward(torch.autograd.Function):
    """f of Megatron-LM: identity forward, all-reduce backward."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


def tensor_parallel_mlp(layers, width, tokens, dtype):
    """Column- then row-parallel linear layers, forward and backward."""
    n = dist.get_world_size()
    up = [torch.randn(4 * width // n, width, dtype=dtype, requires_grad=True) for _ in range(layers)]
    down = [torch.randn(width, 4 * width // n, dtype=dtype, requires_grad=True) for _ in range(layers)]
    x = torch.randn(tokens, width, dtype=dtype, requires_grad=True)
    y = x
    for a, b in zip(up, down):
        hidden = torch.nn.functional.gelu(AllReduceBackward.apply(y) @ a.t())
        y = y + AllReduceForward.apply(hidden @ b.t())
    y.sum().backward()


def exchange():
    rank, n = dist.get_rank(), dist.get_world_size()
    x, y = torch.ones(6), torch.ones(6)
    handle = dist.isend(x, (rank + 1) % n)
    dist.recv(y, (rank - 1) % n)
    handle.wait()
    with torch.profiler.record_function("sum"):
        dist.all_reduce(x)


def mesh():
    from torch.distributed.device_mesh import init_device_mesh

    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    dist.all_reduce(torch.ones(3), group=grid["tensor"].get_group())
    pair = dist.new_group([0, 3])
    if dist.get_rank() in (0, 3):
        dist.broadcast(torch.ones(5), src=3, group=pair)


@pytest.mark.parametrize(
    "program,args,ranks", [(tensor_parallel_mlp, (2, 32, 6, torch.float32), 4), (exchange, (), 3), (mesh, (), 4)]
)
def test_the_record_is_that_of_a_real_run(program, args, ranks):
    real, shapes = (run(program, *args, ranks=ranks, shapes_only=only) for only in (False, True))
    assert shapes.shapes_only and not real.shapes_only
    assert shapes.flops == real.flops and shapes.collectives == real.collectives
    assert (shapes.sent_bytes == real.sent_bytes).all() and shapes.groups == real.groups
    names = [name for name in EVENT.names if name not in ("start", "end", "first_cost", "last_cost")]
    for a, b in zip(real.events, shapes.events):
        keep = [e[names] for e in a if e["kind"] != COMPUTE], [e[names] for e in b if e["kind"] != COMPUTE]
        assert keep[0] == keep[1]


def test_a_gpt_3_sized_block_over_8_ranks():
    layers, width, tokens, n = 12, 12288, 2048, 8
    recording = run(tensor_parallel_mlp, layers, width, tokens, torch.bfloat16, ranks=n, shapes_only=True)
    assert recording.collectives == [("all_reduce", n, 2 * tokens * width, 2 * layers)]
    # two matrices of 4 h x h / n each: one product forward, two backward, 2 FLOPs an element and token
    assert recording.flops == [layers * 3 * 2 * 2 * tokens * width * 4 * width // n] * n
    assert replay(recording, Cluster(H100)).step_time > 0


def test_a_pipeline_over_16_ranks():
    def program(microbatches, tokens, width):
        rank, n = dist.get_rank(), dist.get_world_size()
        weight = torch.empty(width, width)
        for _ in range(microbatches):
            x = torch.empty(tokens, width)
            if rank > 0:
                dist.recv(x, rank - 1)
            x = x @ weight
            if rank < n - 1:
                dist.send(x, rank + 1)

    m, tokens, width, p = 8, 4096, 12288, 16
    recording = run(program, m, tokens, width, ranks=p, shapes_only=True)
    assert recording.sent_messages.sum() == m * (p - 1)
    assert recording.sent_bytes.sum() == m * (p - 1) * 4 * tokens * width
    step, one = (replay(r, Cluster(H100, nodes=2)).step_time for r in (recording, run(program, 1, tokens, width, ranks=1)))
    # every stage computes m microbatches, and the last starts p - 1 microbatches (and messages) late
    assert step > (m + p - 1) * one * 0.99


def test_modules_can_be_converted():
    def program(width):
        model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Embedding(5, width)).to(torch.bfloat16)
        model[0].weight.requires_grad_(True)
        out = model[0](torch.empty(3, width, dtype=torch.bfloat16))
        out.sum().backward()
        grad = model[0].weight.grad
        dist.all_reduce(grad)
        return str(out.dtype), str(grad.dtype), model.half()[1].weight.dtype == torch.float16

    recording = run(program, 4096, ranks=2, shapes_only=True)
    assert recording.results == [("torch.bfloat16", "torch.bfloat16", True)] * 2
    assert recording.collectives == [("all_reduce", 2, 2 * 4096 * 4096, 1)]


def test_a_mesh_made_by_a_function_that_was_imported_before():
    from torch.distributed.device_mesh import init_device_mesh

    def program():
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        return grid["data"].get_local_rank(), grid.get_coordinate(), grid.mesh.tolist()

    results = run(program, ranks=4, shapes_only=True).results
    assert results == [(r // 2, (r // 2, r % 2), [[0, 1], [2, 3]]) for r in range(4)]


# ---- values cannot be read -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "read",
    [
        "x.sum().item()",
        "x.tolist()",
        "float(x[0])",
        "bool(x[0])",
        "x.numpy()",
        "x[x > 0]",
        "x.nonzero()",
        "1 if x[0] > 0 else 2",
        "int(x[0])",
        "torch.save(x, io.BytesIO())",
    ],
)
def test_reading_a_value_says_why_it_cannot_work(read):
    def program():
        return eval(read, {"x": torch.ones(3), "torch": torch, "io": io})

    with pytest.raises(RunError, match="shapes_only") as caught:
        run(program, ranks=2, shapes_only=True)
    assert "shapes and no data" in str(caught.value)


def test_a_copied_module_works_without_a_word(capsys):
    def program():
        layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        return tuple(torch.nn.TransformerEncoder(layer, 2)(torch.ones(2, 5, 16)).shape)

    assert run(program, ranks=2, shapes_only=True).results == [(2, 5, 16)] * 2
    printed = capsys.readouterr()
    assert "rank" not in printed.out and "Warning" not in printed.err


def test_object_collectives_need_data():
    def program():
        dist.all_gather_object([None] * 2, 1)

    with pytest.raises(RunError, match="shapes and no data"):
        run(program, ranks=2, shapes_only=True)


def test_ddp_needs_data():
    def program():
        torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))

    with pytest.raises(RunError, match="shapes and no data"):
        run(program, ranks=2, shapes_only=True)


# ---- mistakes are found here too -------------------------------------------------------------------------------------------


def test_a_mismatch_is_found_without_data():
    def program():
        dist.all_reduce(torch.ones(4 + dist.get_rank()))

    with pytest.raises(Mismatch, match="different sizes"):
        run(program, ranks=3, shapes_only=True)


@pytest.mark.parametrize(
    "partners, ranks, advice",
    [
        ({0: 1, 1: 0}, 2, "even ranks send, odd ranks receive"),
        ({0: 2, 2: 0}, 3, "of two partners the lower rank sends, the other receives"),
        ({0: 1, 1: 2, 2: 0}, 3, "even ranks send, odd ranks receive"),  # a ring
    ],
)
def test_the_order_that_is_advised_would_help(partners, ranks, advice):
    def program():
        if dist.get_rank() in partners:
            dist.send(torch.ones(8), partners[dist.get_rank()])
            back = {to: sender for sender, to in partners.items()}[dist.get_rank()]
            dist.recv(torch.ones(8), back)

    with pytest.raises(Deadlock, match=advice):
        replay(run(program, ranks=ranks, shapes_only=True), Cluster(H100))


def test_a_deadlock_is_explained_by_the_replay_in_the_words_of_a_live_one():
    def program():
        other = 1 - dist.get_rank()
        dist.send(torch.ones(8), other)
        dist.recv(torch.ones(8), other)

    with pytest.raises(Deadlock) as live:
        run(program, ranks=2)
    recording = run(program, ranks=2, shapes_only=True)
    with pytest.raises(Deadlock) as replayed:
        replay(recording, Cluster(H100))
    for text in (str(live.value), str(replayed.value)):
        assert "rank 0 waits in send" in text and "rank 1 waits in send" in text and "even ranks send" in text
        assert "test_shapes_only.py, line" in text and "dist.send(torch.ones(8), other)" in text


# ---- ranks that are alike: two run, all are recorded -----------------------------------------------------------------------


def alike_step(elements, frees):
    """Compute, a collective, and one whose wait comes later: the bytes depend on the number of ranks."""
    n = dist.get_world_size()
    x = torch.ones(elements, requires_grad=True)
    (x * x).sum().backward()
    handle = dist.all_reduce(x.grad, async_op=True)
    shard = torch.empty(-(-elements // n))
    whole = torch.empty(n * shard.numel())
    dist.reduce_scatter_single(shard, whole)
    handle.wait()
    with torch.profiler.record_function("update"):
        shard.add_(1)
    return n, frees


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_alike_ranks_are_recorded_as_if_each_had_run(ranks):
    every = run(alike_step, 1001, "x", ranks=ranks, shapes_only=True)
    alike = run(alike_step, 1001, "x", ranks=ranks, shapes_only=True, alike=True)
    assert alike.results == every.results == [(ranks, "x")] * ranks
    assert alike.world_size == ranks and alike.flops == every.flops and list(alike.collectives) == list(every.collectives)
    assert alike.groups == every.groups and alike.operators == every.operators and alike.labels == every.labels
    timeless = [name for name in EVENT.names if name not in ("start", "end")]
    for one, other in zip(alike.events, every.events):
        assert (one[timeless] == other[timeless]).all()
    cluster = Cluster(H100, devices_per_node=8)
    assert replay(alike, cluster).step_time == replay(every, cluster).step_time


def test_many_alike_ranks_are_two_processes():
    recording = run(alike_step, 4096, None, ranks=1024, shapes_only=True, alike=True)
    assert [row[:2] for row in recording.collectives] == [("all_reduce", 1024), ("reduce_scatter", 1024)]
    assert replay(recording, Cluster(H100, nodes=128)).world_size == 1024


def rank_0_works_more():
    x = torch.ones(8)
    if dist.get_rank() == 0:
        x = x * 2
    dist.all_reduce(x)


def reduces_in_pairs():
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    dist.all_reduce(torch.ones(3), group=pairs[dist.get_rank() // 2])


@pytest.mark.parametrize(
    "program, said",
    [
        (exchange, "sends messages from rank to rank"),
        (rank_0_works_more, "rank 1 comput"),
        (reduces_in_pairs, "a collective of 2 of the 4 ranks"),
    ],
)
def test_ranks_that_are_not_alike_are_refused(program, said):
    with pytest.raises(RunError, match=f"alike=True, but .*{said}.*Leave it out"):
        run(program, ranks=4, shapes_only=True, alike=True)


@pytest.mark.parametrize(
    "options, error, said",
    [
        ({"alike": 1, "shapes_only": True}, TypeError, "alike=1"),
        ({"alike": True}, ValueError, "needs shapes_only=True"),
        ({"alike": True, "shapes_only": True, "ranks": 1025}, ValueError, "ranks=1025: from 1 to 1024"),
        ({"shapes_only": True, "ranks": 65}, ValueError, "ranks=65: from 1 to 64"),
    ],
)
def test_alike_is_checked(options, error, said):
    with pytest.raises(error, match=said):
        run(exchange, **options)
