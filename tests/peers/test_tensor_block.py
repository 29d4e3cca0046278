"""PyTorch's own tensor and sequence parallel for a whole block, beside the course's: values, gradients, calls and bytes."""

import copy

import pytest
import torch
import torch.distributed as dist
from tensor_tools import LLAMA, SMALL, calls, close, mine, noise, stirred
from torch.profiler import record_function

from lessons_lib import models, run
from lessons_lib.parallel import tensor

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2}


def in_order_of_ranks(block, n):
    """A copy whose fused qkv rows are those of rank 0, then those of rank 1, ...: what an even cut then gives each rank."""
    block = copy.deepcopy(block)
    shape = block.attention.shape
    parts = [heads * shape.head_size for heads in (shape.heads, shape.kv_heads, shape.kv_heads)]
    for p in block.attention.qkv.parameters():
        pieces = [part.chunk(n) for part in p.data.split(parts)]
        p.data = torch.cat([piece[rank] for rank in range(n) for piece in pieces])
    return block


def parallelized(block, sequence_parallel, one_entrance=False):
    """PyTorch's plan. one_entrance: x enters the MLP once, for both `up` and `gate`."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    n = dist.get_world_size()
    rows = RowwiseParallel(output_layouts=Shard(1) if sequence_parallel else Replicate())
    plan = {"attention.qkv": ColwiseParallel(), "attention.out": rows, "mlp.up": ColwiseParallel(), "mlp.down": rows}
    if block.mlp.gate is not None:
        plan["mlp.gate"] = ColwiseParallel()
    if sequence_parallel:
        enter = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
        plan |= {"attention_norm": SequenceParallel(), "attention": enter, "mlp_norm": SequenceParallel(), "mlp": enter}
    elif one_entrance:
        replicated = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())
        plan |= {"mlp": replicated}
    mesh = init_device_mesh("cpu", (n,))
    return parallelize_module(in_order_of_ranks(block, n), mesh, plan, src_data_rank=None)


def whole(gradient):
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def both(shape, sequence_parallel, dtype, one_entrance=False):
    """Runs one process, the course's block and PyTorch's; asserts equal values and gradients on every rank."""
    n, tolerance = dist.get_world_size(), TOLERANCE[dtype]
    full, x = stirred(models.Block(shape, dtype=dtype)), noise(2, 8, shape.hidden, dtype=dtype)
    weights = noise(2, 8, shape.hidden, seed=7, dtype=dtype)

    def take(t):
        return mine(t, 1) if sequence_parallel else t

    def step(model, x, weights):
        x = x.clone().requires_grad_()
        y = model(x)
        (y * weights).sum().backward()
        return y, x.grad

    expected = [take(t) for t in step(full, x, weights)]
    ours = tensor.ParallelBlock(full, sequence_parallel=sequence_parallel)
    theirs = parallelized(full, sequence_parallel, one_entrance)
    for name, model in (("ours", ours), ("theirs", theirs)):
        with record_function(name):
            found = step(model, take(x), take(weights))
        for a, b in zip(found, expected):
            close(whole(a), b, tolerance)
    if sequence_parallel:
        tensor.sum_replicated_gradients(ours)
    alike = copy.deepcopy(full)  # one process's gradients where the weights were, to be put in PyTorch's order of rows
    for p, q in zip(alike.parameters(), full.parameters()):
        p.data = q.grad
    for p, q in zip(theirs.parameters(), in_order_of_ranks(alike, n).parameters()):
        close(whole(p.grad), q, tolerance)
    for name in ("attention_norm.weight", "mlp.up.weight"):
        part = full.get_parameter(name).grad
        close(ours.get_parameter(name).grad, part if "norm" in name else mine(part, 0), tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tensor", "sequence"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_block_of_gpt(ranks, sequence_parallel, dtype):
    recording = run(both, SMALL, sequence_parallel, dtype, ranks=ranks)
    size = 2 * 8 * SMALL.hidden * dtype.itemsize
    call = [("all_gather", size), ("reduce_scatter", size)] if sequence_parallel else [("all_reduce", size)]
    for rank in range(ranks):
        assert calls(recording, "ours", rank) == call * 4
        assert calls(recording, "theirs", rank) == (call * 4 if ranks > 1 else [])  # PyTorch spares a group of one the call


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_gated_block_enters_once(ranks, dtype):
    """`up` and `gate` share one f: PyTorch's plan by layers sums twice in backward, one for the whole MLP once."""
    size = 2 * 8 * LLAMA.hidden * dtype.itemsize
    for one_entrance in (False, True):
        recording = run(both, LLAMA, False, dtype, one_entrance, ranks=ranks)
        assert calls(recording, "ours") == [("all_reduce", size)] * 4
        assert calls(recording, "theirs") == [("all_reduce", size)] * (4 if one_entrance else 5)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_gated_block_under_sequence_parallel(ranks):
    recording = run(both, LLAMA, True, torch.float32, ranks=ranks)
    assert calls(recording, "ours") == calls(recording, "theirs")


def test_sizes_that_do_not_divide_are_refused_in_a_sentence():
    def program():
        from lessons_lib import shapes

        shape = shapes.gpt(2, 18, 6, 32, 16)
        try:
            tensor.ParallelBlock(models.Block(shape))
        except ValueError as error:
            return str(error)

    assert run(program, ranks=4).results == [
        "The 6 query heads cannot be cut into equal parts for 4 ranks: 6 / 4 leaves 2 over. Use 3 ranks, or a size that 4 divides, "
        "such as 8."
    ] * 4  # fmt: skip
