"""torch.distributed.pipelining beside the pipelines built by hand, under the same recorder."""

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

from lessons_lib import run  # noqa: E402
from lessons_lib.parallel import pipeline, schedules  # noqa: E402
from lessons_lib.recording import SEND  # noqa: E402

pipelining = pytest.importorskip("torch.distributed.pipelining")

WIDTH, SAMPLES = 10, 2  # samples of a microbatch
KINDS = {  # PyTorch's schedule: chunks a rank, the orders built by hand
    "ScheduleGPipe": (1, schedules.gpipe),
    "Schedule1F1B": (1, schedules.one_f_one_b),
    "ScheduleInterleaved1F1B": (2, lambda p, m: schedules.interleaved(p, m, 2)),
    "ScheduleInterleavedZeroBubble": (1, schedules.zero_bubble_h1),
}
SIZES = [(2, 2), (2, 4), (3, 6), (4, 8)]


class Layer(nn.Module):
    def __init__(self, index):
        super().__init__()
        torch.manual_seed(index)
        self.linear = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x):
        return self.linear(x).tanh()


def mean_square(y, targets):
    return (y - targets).square().mean()


def data(m):
    return torch.arange(SAMPLES * m * WIDTH, dtype=torch.float64).view(SAMPLES * m, WIDTH).sin()


def example(grad):
    return torch.empty(SAMPLES, WIDTH, dtype=torch.float64, requires_grad=grad)


def theirs(kind, m, v, layer):
    """(mean loss on the last rank, gradients of this rank's stages)"""
    from torch.distributed import pipelining

    rank, p = dist.get_rank(), dist.get_world_size()
    mine = range(rank, p * v, p)
    modules = [layer(index) for index in mine]
    stages = [
        pipelining.PipelineStage(
            module, index, p * v, torch.device("cpu"), input_args=(example(index > 0),), output_args=(example(True),)
        )
        for index, module in zip(mine, modules)
    ]
    make = getattr(pipelining, kind, None) or getattr(pipelining.schedules, kind)
    runner = make(stages if kind.startswith("ScheduleI") else stages[0], m, loss_fn=mean_square)
    losses = []
    last = {"target": -data(m), "losses": losses} if rank == p - 1 else {}
    runner.step(*([data(m)] if rank == 0 else []), **last)
    order = getattr(runner, "pipeline_order", {}).get(rank)
    order = order and [str(action) for action in order if action is not None]
    return sum(losses) / m if losses else None, [p.grad for module in modules for p in module.parameters()], order


def ours(orders, m, v, layer):
    rank, p = dist.get_rank(), dist.get_world_size()
    stages = [pipeline.Stage([layer(index)], index, p * v, torch.empty_like) for index in range(rank, p * v, p)]
    microbatches = pipeline.split_into_microbatches(data(m), -data(m), m)
    loss = pipeline.run_schedule(stages, orders, microbatches, mean_square)
    return loss, [p.grad for stage in stages for p in stage.parameters()]


def sent(recording, rank, peer):
    return sorted(int(e["nbytes"]) for e in recording.events[rank] if e["kind"] == SEND and e["peer"] == peer)


@pytest.mark.parametrize("p,m", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_messages_loss_and_gradients(kind, p, m):
    if kind == "ScheduleInterleavedZeroBubble" and not hasattr(pipelining.schedules, kind):
        pytest.skip("this PyTorch has no zero-bubble schedule")
    v, make = KINDS[kind]
    torchs, mine = run(theirs, kind, m, v, Layer, ranks=p), run(ours, make(p, m), m, v, Layer, ranks=p)
    whole = nn.Sequential(*[Layer(index) for index in range(p * v)])
    loss = mean_square(whole(data(m)), -data(m))
    loss.backward()
    for rank in range(p):
        expected = [q.grad for index in range(rank, p * v, p) for q in whole[index].parameters()]
        for result in (torchs.results[rank], mine.results[rank]):
            torch.testing.assert_close(result[1], expected)
            if rank == p - 1:
                torch.testing.assert_close(result[0], loss.detach())
    boundaries = {}  # from rank to rank: how many times a stage here hands on to a stage there, in either direction
    for stage in range(p * v - 1):
        for pair in ((stage % p, (stage + 1) % p), ((stage + 1) % p, stage % p)):
            boundaries[pair] = boundaries.get(pair, 0) + 1
    one = SAMPLES * WIDTH * 8
    for rank in range(p):
        for peer in range(p):
            number = boundaries.get((rank, peer), 0)
            assert sent(mine, rank, peer) == [one] * (m * number)
            channels = sent(torchs, rank, peer)[:number]  # PyTorch opens each channel with a message of a few bytes
            assert all(nbytes <= 8 for nbytes in channels)
            assert sent(torchs, rank, peer) == [*channels, *sent(mine, rank, peer)]
    assert mine.collectives == torchs.collectives == []
    assert mine.flops == torchs.flops


@pytest.mark.parametrize("p,m", SIZES)
def test_pytorchs_interleaved_order_is_ours(p, m):
    recording = run(theirs, "ScheduleInterleaved1F1B", m, 2, Layer, ranks=p)
    for rank, order in enumerate(schedules.interleaved(p, m, 2)):  # theirs: stage, kind, microbatch
        assert recording.results[rank][2] == [f"{one.chunk * p + rank}{one.kind}{one.microbatch}" for one in order]


@pytest.mark.parametrize("p,m", SIZES)
def test_pytorchs_gpipe_runs_its_actions_in_our_order(p, m):
    recording = run(theirs, "ScheduleGPipe", m, 1, Layer, ranks=p)
    for events, order in zip(recording.events, schedules.gpipe(p, m)):
        labels = [recording.labels[event["label"]] for event in events if event["label"] >= 0]
        names = {"F": "Forward", "B": "Backward"}
        assert list(dict.fromkeys(labels)) == [f"{names[one.kind]} {one.microbatch}" for one in order]
