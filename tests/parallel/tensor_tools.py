"""What the tests of tensor parallel share: two small shapes, random values, this rank's part, and comparison."""

import dataclasses

import torch
import torch.distributed as dist
from parts import part

from lessons_lib import shapes
from lessons_lib.recording import COLLECTIVE

SMALL = shapes.Shape(2, 16, 4, 24, 12)
LLAMA = dataclasses.replace(shapes.TINY_LLAMA, layers=2, kv_heads=4)


def stirred(module, seed=3):
    """Biases start at zero and norms at one: stir all, so that one added n times, or left out, shows."""
    generator = torch.Generator().manual_seed(seed)
    for p in module.parameters():
        p.data.add_(torch.randn(p.shape, generator=generator).mul_(0.3).to(p.dtype))
    return module


def noise(*size, seed=5, dtype=torch.float32):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def mine(x, dim):
    return x.chunk(dist.get_world_size(), dim)[dist.get_rank()]


def rows_of(x, parts):
    """This rank's rows of fused matrices, by index: written otherwise than in the library."""
    rank, n = dist.get_rank(), dist.get_world_size()
    starts = [sum(parts[:i]) for i in range(len(parts))]
    return x[[s + rank * p // n + i for s, p in zip(starts, parts) for i in range(p // n)]]


def close(got, expected, tolerance=2e-5):
    """Largest difference, against the largest number expected."""
    scale = expected.detach().float().abs().max().item() + 1e-30
    difference = (got.detach().float() - expected.detach().float()).abs().max().item()
    assert got.shape == expected.shape and difference <= tolerance * scale, (difference, scale)


def close_block(got, full, tolerance=2e-5):
    """Gradients of a rank's block against its part of the whole block's."""
    shape = full.attention.shape
    qkv = [k * shape.head_size for k in (shape.heads, shape.kv_heads, shape.kv_heads)]
    a, b = got.attention.heads, full.attention
    close(a.qkv.weight.grad, rows_of(b.qkv.weight.grad, qkv), tolerance)
    close(a.out.weight.grad, mine(b.out.weight.grad, 1), tolerance)
    for name in ("up", "gate"):
        if getattr(full.mlp, name) is not None:
            close(getattr(got.mlp, name).weight.grad, mine(getattr(full.mlp, name).weight.grad, 0), tolerance)
    close(got.mlp.down.weight.grad, mine(full.mlp.down.weight.grad, 1), tolerance)
    if shape.biases:
        close(a.qkv.bias.grad, rows_of(b.qkv.bias.grad, qkv), tolerance)
        close(a.out.bias.grad, b.out.bias.grad, tolerance)
        close(got.mlp.up.bias.grad, mine(full.mlp.up.bias.grad, 0), tolerance)
        close(got.mlp.down.bias.grad, full.mlp.down.bias.grad, tolerance)
    for name in ("attention_norm", "mlp_norm"):
        for p, q in zip(getattr(got, name).parameters(), getattr(full, name).parameters()):
            close(p.grad, q.grad, tolerance)


def calls(recording, label, rank=0):
    """(operation, bytes) of every collective under that label, in order."""
    one = part(recording, label)
    return [(one.ops[e["op"]], int(e["nbytes"])) for e in one.events[rank] if e["kind"] == COLLECTIVE]
