"""Tensor parallel by hand equals one process in values and gradients, and issues exactly what theory says."""

import copy
import dataclasses

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from tensor_tools import LLAMA, SMALL, calls, close, close_block, mine, noise, stirred  # noqa: E402
from torch import nn  # noqa: E402
from torch.profiler import record_function  # noqa: E402

from lessons_lib import models, run  # noqa: E402
from lessons_lib.parallel import tensor  # noqa: E402

WORLDS = (1, 2, 4)

# ---- the conjugate pairs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", WORLDS)
def test_f_and_g_with_two_scalars(ranks):
    """y = sum over ranks of a_r x, a_r = r + 1: dy/dx = sum of a_r, dy/da_r = x."""

    def program():
        x, a = torch.tensor(3.0, requires_grad=True), torch.tensor(dist.get_rank() + 1.0, requires_grad=True)
        y = tensor.g(a * tensor.f(x))
        (10 * y).backward()
        return y.item(), x.grad.item(), a.grad.item()

    total = ranks * (ranks + 1) / 2
    assert run(program, ranks=ranks).results == [(3 * total, 10 * total, 30.0)] * ranks


def test_autograd_does_not_see_a_plain_all_reduce():
    """The mistake: without f the gradient is the local one, without an error, and it differs from rank to rank."""

    def program():
        x = torch.tensor(3.0, requires_grad=True)
        y = x * (dist.get_rank() + 1)
        dist.all_reduce(y)
        y.backward()
        return y.item(), x.grad.item()

    assert run(program, ranks=2).results == [(9.0, 1.0), (9.0, 2.0)]


@pytest.mark.parametrize("ranks", WORLDS)
def test_the_sequence_pair(ranks):
    def program():
        rank, n = dist.get_rank(), dist.get_world_size()
        whole = noise(2, 8, 3)
        x = mine(whole, 1).clone().requires_grad_()
        gathered = tensor.gather_sequence(x)
        assert torch.equal(gathered, whole)
        (gathered * (rank + 1) * whole).sum().backward()
        close(x.grad, mine(whole, 1) * n * (n + 1) / 2)
        x = (whole * (rank + 1)).requires_grad_()
        part = tensor.scatter_sequence(x)
        close(part, mine(whole, 1) * n * (n + 1) / 2)
        (part * mine(whole, 1)).sum().backward()
        assert torch.equal(x.grad, whole)

    run(program, ranks=ranks)


# ---- layers ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("ranks", WORLDS)
def test_column_and_row_linear(ranks, bias):
    def program():
        for inputs, outputs in ((4, 8), (12, 4), (8, 20)):
            torch.manual_seed(inputs)
            full, x = nn.Linear(inputs, outputs, bias=bias), noise(3, inputs).requires_grad_()
            y = full(x)
            y.square().sum().backward()
            column, z = tensor.ColumnParallelLinear(full), x.detach().clone().requires_grad_()
            part = column(z)
            close(part, mine(y, 1))
            part.square().sum().backward()
            close(z.grad, x.grad)
            close(column.weight.grad, mine(full.weight.grad, 0))
            row, z = tensor.RowParallelLinear(full), mine(x.detach(), 1).clone().requires_grad_()
            out = row(z)
            close(out, y)
            out.square().sum().backward()
            close(z.grad, mine(x.grad, 1))
            close(row.weight.grad, mine(full.weight.grad, 1))
            if bias:  # added once, after the sum: value above, gradient here
                close(row.bias.grad, full.bias.grad)
                close(column.bias.grad, mine(full.bias.grad, 0))

    run(program, ranks=ranks)


def test_a_bias_on_every_rank_counts_n_times():
    """The mistake: inside the sum, 4 ranks add 4 biases."""

    def program():
        full = stirred(nn.Linear(8, 4))
        part = F.linear(mine(torch.zeros(1, 8), 1), mine(full.weight, 1), full.bias)
        close(tensor.g(part)[0], 4 * full.bias)
        close(tensor.RowParallelLinear(full)(mine(torch.zeros(1, 8), 1))[0], full.bias)

    run(program, ranks=4)


@pytest.mark.parametrize("shape", [SMALL, LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize("ranks", WORLDS)
def test_mlp_attention_and_block(ranks, shape):
    def program(dtype, tolerance):
        n = dist.get_world_size()
        block = stirred(models.Block(shape, dtype=dtype))
        whole = noise(2, 8, shape.hidden, dtype=dtype)
        for full, cut in (
            (block.mlp, tensor.ParallelMLP),
            (block.attention, tensor.ParallelAttention),
            (block, tensor.ParallelBlock),
        ):
            full.zero_grad()
            x = whole.clone().requires_grad_()
            y = full(x)
            weights = noise(*y.shape, seed=6, dtype=dtype)
            (y * weights).sum().backward()
            for sequence_parallel in (False, True):
                split = cut(full, sequence_parallel=sequence_parallel)
                z = (mine(whole, 1) if sequence_parallel else whole).clone().requires_grad_()
                out = split(z)
                close(out, mine(y, 1) if sequence_parallel else y, tolerance)
                (out * (mine(weights, 1) if sequence_parallel else weights)).sum().backward()
                close(z.grad, mine(x.grad, 1) if sequence_parallel else x.grad, tolerance)
                if sequence_parallel:
                    tensor.sum_replicated_gradients(split)
                if full is block:
                    close_block(split, block, tolerance)
                    assert sum(p.numel() for p in tensor.sharded_and_replicated(split)[0]) * n == sum(
                        p.numel() for name, p in block.named_parameters() if "norm" not in name and name not in BIASES
                    )

    BIASES = ("attention.out.bias", "mlp.down.bias")
    run(program, torch.float32, 2e-5, ranks=ranks)
    run(program, torch.bfloat16, 4e-2, ranks=ranks)


@pytest.mark.parametrize("ranks", [2, 4])
def test_mlp_equals_dtensors_plan_in_values_and_calls(ranks):
    def program():
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        full, whole = stirred(models.MLP(SMALL)), noise(2, 8, SMALL.hidden)
        ours = tensor.ParallelMLP(full)
        theirs = parallelize_module(
            copy.deepcopy(full),
            init_device_mesh("cpu", (dist.get_world_size(),)),
            {"up": ColwiseParallel(), "down": RowwiseParallel()},
        )
        found = []
        for name, model in (("ours", ours), ("theirs", theirs)):
            x = whole.clone().requires_grad_()
            with record_function(name):
                y = model(x)
                y.square().sum().backward()
            found.append((y, x.grad))
        for a, b in zip(*found):
            close(a, b)
        for name in ("up.weight", "up.bias", "down.weight"):
            close(ours.get_parameter(name).grad, theirs.get_parameter(name).grad.to_local())
        close(ours.down.bias.grad, theirs.down.bias.grad.full_tensor())

    recording = run(program, ranks=ranks)
    size = 2 * 8 * SMALL.hidden * 4
    assert calls(recording, "ours") == calls(recording, "theirs") == [("all_reduce", size)] * 2


def test_fused_qkv_cut_evenly_is_not_a_share_of_heads():
    """The mistake: rows 0-23 of 48 are all of Q and half of K, not heads 0 and 1."""

    def program():
        full = stirred(models.Attention(SMALL)).qkv  # 3 x 16 rows
        right = tensor.ColumnParallelLinear(full, parts=[16, 16, 16]).weight
        wrong = tensor.ColumnParallelLinear(full).weight
        first = 8 * dist.get_rank()
        rows = [*range(first, first + 8), *range(16 + first, 24 + first), *range(32 + first, 40 + first)]
        assert torch.equal(right, full.weight[rows]) and not torch.equal(right, wrong)

    run(program, ranks=2)


# ---- the whole transformer -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [SMALL, dataclasses.replace(LLAMA, tied=False)], ids=["gpt", "llama"])
@pytest.mark.parametrize("ranks", WORLDS)
def test_five_steps_of_the_transformer(ranks, shape):
    def program():
        full = stirred(models.Transformer(shape)).double()
        splits = {flag: tensor.ParallelTransformer(full, sequence_parallel=flag) for flag in (False, True)}
        optimizers = {m: torch.optim.AdamW(m.parameters(), lr=0.01) for m in (full, *splits.values())}
        for step in range(5):
            tokens = torch.randint(shape.vocabulary, (2, 9), generator=torch.Generator().manual_seed(step))
            inputs, targets = tokens[:, :-1], tokens[:, 1:]
            for model in optimizers:
                model.zero_grad()
            loss = models.next_token_loss(full(inputs), targets)
            loss.backward()
            norm = torch.stack([p.grad.square().sum() for p in full.parameters()]).sum().sqrt()
            for sequence_parallel, model in splits.items():
                got = tensor.vocabulary_parallel_loss(model(inputs), targets)
                close(got, loss, 1e-9)
                got.backward()
                if sequence_parallel:
                    tensor.sum_replicated_gradients(model)
                close(tensor.gradient_norm(model), norm, 1e-5)
                close(model.tokens.weight.grad, mine(full.embedding.tokens.weight.grad, 0), 1e-6)
                close(model.logits.weight.grad, mine(full.head.logits.weight.grad, 0), 1e-6)
                if shape.positions == "learned":
                    close(model.positions.weight.grad, full.embedding.positions.weight.grad, 1e-6)
                for p, q in zip(model.norm.parameters(), full.head.norm.parameters()):
                    close(p.grad, q.grad, 1e-6)
                for a, b in zip(model.blocks, full.blocks):
                    close_block(a, b, 1e-6)
            for optimizer in optimizers.values():
                optimizer.step()

    run(program, ranks=ranks)


def test_two_groups_of_two_ranks_work_on_batches_of_their_own():
    def program():
        from lessons_lib.parallel.collectives import node_groups

        group, _ = node_groups(2)
        batch, place = divmod(dist.get_rank(), 2)
        full = stirred(models.Transformer(SMALL))
        tokens = torch.randint(SMALL.vocabulary, (2, 9), generator=torch.Generator().manual_seed(batch))
        loss = models.next_token_loss(full(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        norm = torch.stack([p.grad.square().sum() for p in full.parameters()]).sum().sqrt()
        for sequence_parallel in (False, True):
            split = tensor.ParallelTransformer(full, group, sequence_parallel=sequence_parallel)
            got = tensor.vocabulary_parallel_loss(split(tokens[:, :-1]), tokens[:, 1:], group)
            close(got, loss)
            got.backward()
            if sequence_parallel:
                tensor.sum_replicated_gradients(split, group)
            close(tensor.gradient_norm(split, group), norm)
            close(split.tokens.weight.grad, full.embedding.tokens.weight.grad.chunk(2)[place], 1e-4)
            close(split.positions.weight.grad, full.embedding.positions.weight.grad, 1e-4)
        return loss.item()

    losses = run(program, ranks=4).results
    assert losses[0] == losses[1] != losses[2] == losses[3]


# ---- calls and bytes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [SMALL, LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize("ranks,shapes_only", [(2, False), (4, False), (8, True)])
def test_calls_and_bytes_are_the_formulas(ranks, shapes_only, shape):
    if ranks == 8:
        shape = dataclasses.replace(shape, hidden=64, heads=8, kv_heads=8)
    b, s = 3, 8

    def program():
        for name, flag in (("tensor", False), ("sequence", True)):
            model = tensor.ParallelTransformer(models.Transformer(shape), sequence_parallel=flag)
            tokens = torch.zeros(b, s, dtype=torch.int64)
            with record_function(f"{name} forward"):
                logits = model(tokens)
            with record_function(f"{name} loss"):
                loss = tensor.vocabulary_parallel_loss(logits, tokens)
            with record_function(f"{name} backward"):
                loss.backward()

    recording = run(program, ranks=ranks, shapes_only=shapes_only)
    size, layers = 4 * b * s * shape.hidden, shape.layers
    for rank in range(ranks):
        # 2 a layer, and one after the embedding (forward) or before the logits (backward)
        assert calls(recording, "tensor forward", rank) == [("all_reduce", size)] * (2 * layers + 1)
        assert calls(recording, "tensor backward", rank) == [("all_reduce", size)] * (2 * layers + 1)
        pairs = [("all_gather", size), ("reduce_scatter", size)] * 2 * layers
        assert calls(recording, "sequence forward", rank) == [("reduce_scatter", size), *pairs, ("all_gather", size)]
        backward = [("all_gather", size), ("reduce_scatter", size)] * 2 * layers
        assert calls(recording, "sequence backward", rank) == [("reduce_scatter", size), *backward, ("all_gather", size)]
        for name in ("tensor loss", "sequence loss"):  # the largest; the sum and the target's: never the logits
            assert calls(recording, name, rank) == [("all_reduce", 4 * b * s), ("all_reduce", 8 * b * s)]
