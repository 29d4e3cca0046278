"""PyTorch's own parallelism, unmodified, under the recorder: what it issues is what theory says, and it is right.

Every program also trains the same network in one process on the whole batch, and the results must agree.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lessons_lib import run
from lessons_lib.recording import COLLECTIVE, COMPUTE, SEND, WAIT

WIDTHS = (12, 20, 8)  # of the network: two linear layers
STEPS = 5


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTHS[0], WIDTHS[1]), nn.ReLU(), nn.Linear(WIDTHS[1], WIDTHS[2]))


def data(step, batch):
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(batch, WIDTHS[0], generator=generator), torch.randn(batch, WIDTHS[2], generator=generator)


def one_process(batch):
    """The network's parameters after five steps on whole batches."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        x, y = data(step, batch)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def train(model, batch):
    """Five steps on this rank's part of each batch."""
    rank, n = dist.get_rank(), dist.get_world_size()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        x, y = (t.chunk(n)[rank] for t in data(step, batch))
        optimizer.zero_grad()
        with torch.profiler.record_function("step"):
            nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()


def close(got, expected):
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def calls(recording, kind, rank=0):
    """(bytes, blocking) of the rank's collectives of one kind, in order."""
    events = recording.events[rank]
    return [(int(e["nbytes"]), bool(e["blocking"])) for e in events if e["kind"] == COLLECTIVE and recording.ops[e["op"]] == kind]


def parameter_bytes():
    return [4 * p.numel() for p in network().parameters()]


# ---- data parallel ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ddp(ranks):
    def program(batch):
        from torch.nn.parallel import DistributedDataParallel

        model = DistributedDataParallel(network(seed=dist.get_rank()), bucket_cap_mb=0.0005)
        model.module.load_state_dict(network().state_dict())
        train(model, batch)
        return [p.detach() for p in model.parameters()]

    recording = run(program, 12, ranks=ranks)
    for result in recording.results:
        close(result, one_process(12))
    total = sum(parameter_bytes())
    reduced = [nbytes for nbytes, _ in calls(recording, "all_reduce")]
    # every step all-reduces every gradient once, in buckets: first as one, then as DDP has rebuilt them
    assert sum(reduced) == STEPS * total
    assert len(reduced) > STEPS
    for rank in range(1, ranks):
        assert calls(recording, "all_reduce", rank) == calls(recording, "all_reduce")
    # initial parameters are broadcast once
    assert sum(nbytes for nbytes, _ in calls(recording, "broadcast")) >= total
    assert recording.sent_messages.sum() == 0


def test_ddp_overlaps_its_buckets_with_backward():
    def program():
        from torch.nn.parallel import DistributedDataParallel

        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)]), bucket_cap_mb=0.02)
        for _ in range(3):
            model(torch.randn(4, 64)).sum().backward()

    recording = run(program, ranks=2)
    events = recording.events[0]
    last = [i for i, e in enumerate(events) if e["kind"] == COLLECTIVE and not e["blocking"]][-6:]
    waits = {int(e["target"]): i for i, e in enumerate(events) if e["kind"] == WAIT}
    hidden = [i for i in last if any(events[j]["kind"] == COMPUTE for j in range(i + 1, waits[i]))]
    assert len(hidden) >= 4  # all but those that backward ends with


@pytest.mark.parametrize("ranks", [2, 4])
def test_fsdp2(ranks):
    def program(batch):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        model = network()
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        train(model, batch)
        dist.barrier()
        return [p.full_tensor().detach() for p in model.parameters()]

    recording = run(program, 12, ranks=ranks)
    for result in recording.results:
        close(result, one_process(12))
    events = recording.events[0]
    end = next(i for i, e in enumerate(events) if e["kind"] == COLLECTIVE and recording.ops[e["op"]] == "barrier")
    training = [(recording.ops[e["op"]], int(e["nbytes"])) for e in events[:end] if e["kind"] == COLLECTIVE]

    def unit(weight, bias):  # each parameter is padded to a multiple of the ranks along its first dimension
        rows = -(-bias // 4 // ranks) * ranks
        return rows * (weight // (bias // 4)) + rows * 4

    first, second = unit(*parameter_bytes()[:2]), unit(*parameter_bytes()[2:])
    # ZeRO-3: parameters are gathered for forward and again for backward, gradients are reduce-scattered once
    assert training.count(("all_gather", first)) == 2 * STEPS
    assert training.count(("all_gather", second)) == 2 * STEPS
    assert training.count(("reduce_scatter", first)) == training.count(("reduce_scatter", second)) == STEPS
    assert len(training) == 6 * STEPS


# ---- tensor parallel ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("shapes_only", [False, True])
def test_dtensor_tensor_parallel(ranks, shapes_only):
    def program(batch):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        model = network()
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        dist.barrier()
        x = data(0, batch)[0].requires_grad_()
        out = model(x)
        out.square().mean().backward()
        dist.barrier()
        return out.detach(), x.grad, model[0].weight.grad.full_tensor(), model[2].bias.grad.full_tensor()

    batch = 6
    recording = run(program, batch, ranks=ranks, shapes_only=shapes_only)
    if not shapes_only:
        model, x = network(), data(0, batch)[0].requires_grad_()
        out = model(x)
        out.square().mean().backward()
        for result in recording.results:
            close(result, [out.detach(), x.grad, model[0].weight.grad, model[2].bias.grad])
    events = recording.events[0]
    issued = [recording.ops[e["op"]] for e in events if e["kind"] == COLLECTIVE]
    between = issued[issued.index("barrier") + 1 : len(issued) - 1 - issued[::-1].index("barrier")]
    # one all-reduce at the end of forward, of the output; one at the end of backward, of the input's gradient
    assert between == ["all_reduce", "all_reduce"]
    sizes = [nbytes for nbytes, _ in calls(recording, "all_reduce")][:2]
    assert sizes == [4 * batch * WIDTHS[2], 4 * batch * WIDTHS[0]]


# ---- pipeline parallel ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
@pytest.mark.parametrize("stages,microbatches", [(2, 2), (3, 4), (4, 8)])
def test_pipelining(schedule, stages, microbatches):
    width = 10

    def layer(stage):
        torch.manual_seed(stage)
        return nn.Linear(width, width)

    def program(batch):
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

        rank, n = dist.get_rank(), dist.get_world_size()
        example = torch.empty(batch // microbatches, width, requires_grad=rank > 0)
        module = layer(rank)
        stage = PipelineStage(module, rank, n, torch.device("cpu"), input_args=(example,), output_args=(module(example),))
        make = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}[schedule]
        runner = make(stage, microbatches, loss_fn=lambda out, y: (out - y).square().mean())
        x, y = torch.ones(batch, width), torch.zeros(batch, width)
        runner.step(*([x] if rank == 0 else []), **({"target": y} if rank == n - 1 else {}))
        return module.weight.grad

    batch = 2 * microbatches
    recording = run(program, batch, ranks=stages)
    model = nn.Sequential(*[layer(s) for s in range(stages)])
    model(torch.ones(batch, width)).square().mean().backward()
    close(recording.results, [part.weight.grad for part in model])
    one = 4 * (batch // microbatches) * width
    for rank, events in enumerate(recording.events):
        for neighbour in {rank - 1, rank + 1} & set(range(stages)):
            sent = [int(e["nbytes"]) for e in events if e["kind"] == SEND and e["peer"] == neighbour]
            # one message a microbatch and direction at every boundary; before the first, PyTorch opens each channel with one byte
            assert sorted(sent)[1:] == [one] * microbatches and min(sent) <= 8
        assert not any(e["kind"] == SEND and abs(e["peer"] - rank) != 1 for e in events)
    assert sum(recording.flops) > 0 and recording.collectives == []
