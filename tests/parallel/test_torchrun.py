"""The lessons' programs on plain gloo under torchrun, with nothing of the course but lessons_lib/parallel."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
ROOT = Path(__file__).resolve().parents[2]
BEFORE = """import os
import sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, n = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
"""
# four processes that print into one pipe may glue their lines together
AFTER = """
ours = sorted(m.removeprefix("lessons_lib.") for m in sys.modules if m.startswith("lessons_lib."))
with open(f"rank {rank}.txt", "w") as file:
    file.write(f"rank {rank} of {n}: {ours}")
dist.barrier()
sys.stdout.flush()
os._exit(0)  # gloo's threads, taken down while others still use theirs, may abort a rank that is done
"""
COLLECTIVES = """
from lessons_lib.parallel import collectives as c

for size in (1, 7, 1000):
    x = torch.randn(size, dtype=torch.float64)
    total = x.clone()
    dist.all_reduce(total)
    for name in ("naive", "binomial", "ring", "whole_buffer_ring", "halving_doubling", "recursive_doubling"):
        y = x.clone()
        getattr(c, name + "_all_reduce")(y)
        assert torch.allclose(y, total), name
    y = x.clone()
    c.hierarchical_all_reduce(y, *c.node_groups(n // 2))
    assert torch.allclose(y, total)
"""
DATA_PARALLEL = """
from torch import nn
from lessons_lib.parallel import data

SAMPLES, STEPS = 10, 5  # so 3, 3, 2 and 2

def model_of():
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 1)).double()

def batch_of(step):
    return torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)

def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)

def loss_of(model, batch):
    return (model(batch).squeeze(1) - batch.sum(dim=1)).square().mean()

def trained(way):
    model = model_of()
    if way == "replicated":
        with torch.no_grad():
            for p in model.parameters():
                p += rank  # every rank starts elsewhere
        data.broadcast_parameters(model)
    if way in ("alone", "replicated", "flat", "buckets"):
        optimizer, buckets = adamw(model.parameters()), data.Buckets(model, 300) if way == "buckets" else None
        for step in range(STEPS):
            batch = batch_of(step)
            mine = batch if way == "alone" else data.split_batch(batch)
            share = len(mine) / SAMPLES
            if buckets:
                buckets.share = share
            optimizer.zero_grad()
            data.accumulate_gradients(lambda part: loss_of(model, part), mine.tensor_split(2), buckets)
            if buckets:
                buckets.wait()
            elif way == "flat":
                data.average_gradients_flat(model, share)
            elif way == "replicated":
                data.average_gradients(model, share)
            data.clip_gradients(0.5, replicated=model.parameters())
            optimizer.step()
        return list(model.parameters())
    layers = [model[0], model[2], model[4]]
    zero = {
        "zero1": lambda: data.Zero1(model, adamw),
        "zero2": lambda: data.Zero2(model, layers, adamw),
        "zero3": lambda: data.Zero3(model, layers, adamw),
    }[way]()
    for step in range(STEPS):
        mine = data.split_batch(batch_of(step))
        zero.share = len(mine) / SAMPLES
        data.accumulate_gradients(lambda part: loss_of(model, part), mine.tensor_split(2))
        zero.reduce_gradients()
        data.clip_gradients(0.5, sharded=zero.shards)
        zero.step()
    if way == "zero3":
        zero.gather()
    return list(model.parameters())

expected = trained("alone")
assert any(not torch.allclose(a, b) for a, b in zip(expected, model_of().parameters()))
for way in ("replicated", "flat", "buckets", "zero1", "zero2", "zero3"):
    for found, right in zip(trained(way), expected, strict=True):
        assert torch.allclose(found, right, rtol=1e-9, atol=1e-12), way
"""
PROGRAMS = {
    "collectives": (COLLECTIVES, ["parallel", "parallel.collectives", "parallel.messages", "parallel.rooted"]),
    "data parallel": (
        DATA_PARALLEL,
        ["parallel", "parallel.buckets", "parallel.data", "parallel.flat", "parallel.messages", "parallel.sharded"],
    ),
}


@pytest.mark.skipif(sys.platform == "win32", reason="torchrun needs libuv, which some builds of torch for Windows lack")
@pytest.mark.parametrize("name", PROGRAMS)
def test_they_run_under_torchrun_as_they_are(tmp_path, name):
    source, modules = PROGRAMS[name]
    program = tmp_path / "program.py"
    program.write_text(BEFORE + source + AFTER, encoding="utf-8")
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback}
    ran = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(program)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    for rank in range(4):
        assert (tmp_path / f"rank {rank}.txt").read_text() == f"rank {rank} of 4: {modules}"
