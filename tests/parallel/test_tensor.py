"""Tensor parallel by hand equals one process in values and gradients, and issues exactly what theory says."""

import copy
import dataclasses

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from parts import part  # noqa: E402
from torch import nn  # noqa: E402
from torch.profiler import record_function  # noqa: E402

from lessons_lib import models, run, shapes  # noqa: E402
from lessons_lib.parallel import tensor  # noqa: E402
from lessons_lib.recording import COLLECTIVE  # noqa: E402

WORLDS = (1, 2, 4)
SMALL = shapes.Shape(2, 16, 4, 24, 12)
LLAMA = dataclasses.replace(shapes.TINY_LLAMA, layers=2, kv_heads=4)


# ---- tools -----------------------------------------------------------------------------------------------------------------


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
    run(program, torch.bfloat16, 6e-2, ranks=ranks)


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


# ---- vocabulary ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", WORLDS)
def test_cross_entropy_equals_torchs_even_for_large_logits(ranks):
    def program():
        targets = torch.randint(24, (3, 5), generator=torch.Generator().manual_seed(1))
        for scale, shift, dtype, tolerance in (
            (1, 0, torch.float32, 1e-5), (1, 1e4, torch.float64, 1e-9), (300, 0, torch.float32, 1e-5), (3, 0, torch.bfloat16, 1e-2),
        ):  # fmt: skip
            whole = (noise(3, 5, 24) * scale + shift).to(dtype).requires_grad_()
            loss = models.next_token_loss(whole, targets)
            (7 * loss).backward()
            x = mine(whole.detach(), 2).clone().requires_grad_()
            got = tensor.vocabulary_parallel_loss(x, targets)
            assert got.dtype == loss.dtype and x.dtype == dtype and got.isfinite()
            close(got, loss, tolerance)
            (7 * got).backward()
            close(x.grad, mine(whole.grad, 2), tolerance)

    run(program, ranks=ranks)


# ---- random state, norm, LayerNorm -----------------------------------------------------------------------------------------


def test_random_states_share_and_differ():
    def program():
        states = tensor.RandomStates(11)
        torch.manual_seed(100)
        before = torch.get_rng_state()
        with states.replicated():
            same = torch.rand(4)
        with states.sharded():
            other = torch.rand(4)
        with states.replicated():
            again = torch.rand(4)
        assert torch.equal(torch.get_rng_state(), before)  # the global state is left as it was
        assert not torch.equal(same, again)  # a stream goes on
        return same.tolist(), other.tolist(), again.tolist()

    results = run(program, ranks=4).results
    same, other, again = zip(*results)
    assert same[0] == same[1] == same[2] == same[3] and again[0] == again[3]
    assert len({tuple(o) for o in (*other, same[0])}) == 5


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_dropout_masks(sequence_parallel):
    """Replicas share the mask of what leaves; parts of the sequence, and the heads' attention weights, do not."""

    def program():
        shape = dataclasses.replace(SMALL, layers=1)
        block = models.Block(shape, dropout=0.5)
        torch.manual_seed(dist.get_rank())  # ranks whose global states differ, as with real data loading
        split = tensor.ParallelBlock(block, sequence_parallel=sequence_parallel, random=tensor.RandomStates(1))
        weights = []
        inner = split.attention.heads.attention.function

        def watched(q, k, v, p):
            weights.append(F.dropout(torch.ones(64), p).tolist())
            return inner(q, k, v, p)

        split.attention.heads.attention.function = watched
        x = noise(2, 8, 16)
        out = split(mine(x, 1) if sequence_parallel else x)
        split.eval()
        kept = split.mlp.dropout(torch.ones(64)).tolist()
        split.train()
        return out.tolist(), split.mlp.dropout(torch.ones(64)).tolist(), weights, kept

    a, b = run(program, ranks=2).results
    assert (a[0] == b[0]) is not sequence_parallel
    assert (a[1] == b[1]) is not sequence_parallel and set(a[1]) == {0.0, 2.0}
    assert a[2] != b[2] and len(a[2]) == 1
    assert a[3] == b[3] == [1.0] * 64


def test_dropout_of_replicas_equals_one_process_with_that_seed():
    def program():
        full, x = stirred(models.MLP(SMALL, dropout=0.5)), noise(2, 8, SMALL.hidden)
        torch.manual_seed(9)
        expected = full(x)
        torch.manual_seed(dist.get_rank())
        close(tensor.ParallelMLP(full, random=tensor.RandomStates(9))(x), expected)

    run(program, ranks=2)


def test_norm_counts_replicas_once():
    """4 ranks: sharded gradients 2 each (4 x 4 = 16), a replicated one 2 (4): sqrt(20) = 4.472, not sqrt(16 + 4 x 4) = 5.657."""

    def program():
        layer = tensor.RowParallelLinear(nn.Linear(4, 1))
        layer.weight.grad, layer.bias.grad = torch.full((1, 1), 2.0), torch.full((1,), 2.0)
        wrong = layer.weight.grad.square().sum() + layer.bias.grad.square().sum()
        dist.all_reduce(wrong)
        norm = tensor.clip_gradients(layer, 1.0)
        return norm.item(), wrong.sqrt().item(), tensor.gradient_norm(layer).item()

    for norm, wrong, after in run(program, ranks=4).results:
        assert (round(norm, 3), round(wrong, 3), round(after, 3)) == (4.472, 5.657, 1.0)


def test_norm_gradients_under_sequence_parallel_are_parts_until_summed():
    """The mistake: without the sum each rank's LayerNorm sees its own part of the sequence alone, and the replicas drift apart."""

    def program():
        block, whole = stirred(models.Block(SMALL)), noise(2, 8, SMALL.hidden)
        block(whole).square().sum().backward()
        split = tensor.ParallelBlock(block, sequence_parallel=True)
        split(mine(whole, 1).clone()).square().sum().backward()
        before = split.attention_norm.weight.grad.clone()
        with record_function("sum"):
            tensor.sum_replicated_gradients(split)
        close_block(split, block)
        return before

    recording = run(program, ranks=2)
    assert not torch.allclose(*recording.results, rtol=1e-2)
    # weight and bias of two norms, and the two row-parallel biases: h elements each
    assert calls(recording, "sum") == [("all_reduce", 4 * SMALL.hidden)] * 6


# ---- refusals --------------------------------------------------------------------------------------------------------------


def test_what_cannot_be_cut_is_refused_in_a_sentence():
    def program():
        refused = []

        def attempt(make, *args, **kwargs):
            try:
                make(*args, **kwargs)
            except (TypeError, ValueError, IndexError) as error:
                refused.append(f"{type(error).__name__}: {error}")
            else:
                refused.append(f"accepted {make} {args}")

        attempt(tensor.ColumnParallelLinear, nn.Linear(4, 10))
        attempt(tensor.RowParallelLinear, nn.Linear(7, 4))
        attempt(tensor.ColumnParallelLinear, nn.Linear(4, 12), parts=[4, 4])
        attempt(tensor.ColumnParallelLinear, None)
        attempt(tensor.ParallelMLP, nn.Linear(4, 4))
        attempt(tensor.ParallelAttention, models.Attention(shapes.TINY_LLAMA))
        attempt(tensor.ParallelAttention, models.Attention(dataclasses.replace(SMALL, hidden=18, heads=6, kv_heads=6)))
        attempt(tensor.VocabularyParallelEmbedding, nn.Embedding(50257, 4))
        attempt(tensor.scatter_sequence, torch.zeros(1, 5, 2))
        attempt(tensor.f, 3)
        attempt(tensor.RowParallelLinear(nn.Linear(8, 4)), torch.zeros(2, 8))
        attempt(tensor.ColumnParallelLinear(nn.Linear(8, 4)), None)
        whole = models.Transformer(SMALL)
        attempt(tensor.ParallelTransformer(whole), torch.zeros(1, 13, dtype=torch.int64))
        attempt(tensor.ParallelTransformer(whole, sequence_parallel=True), torch.zeros(1, 6, dtype=torch.int64))
        attempt(tensor.ParallelMLP, models.MLP(SMALL, dropout=0.1))
        attempt(tensor.ParallelBlock, models.Block(SMALL), sequence_parallel=1)
        attempt(tensor.RandomStates, -1)
        attempt(tensor.clip_gradients, nn.Linear(1, 1), float("nan"))
        embedding = tensor.VocabularyParallelEmbedding(nn.Embedding(8, 4))
        attempt(embedding, torch.tensor([[8]]))
        attempt(embedding, torch.tensor([[-1]]))
        attempt(embedding, torch.tensor([[0.5]]))
        attempt(tensor.vocabulary_parallel_loss, torch.zeros(1, 2, 3), torch.zeros(1, 3, dtype=torch.int64))
        attempt(tensor.vocabulary_parallel_loss, torch.zeros(1, 2, 3), None)
        attempt(tensor.vocabulary_parallel_loss, torch.zeros(1, 2, 2), torch.tensor([[0, 8]]))
        attempt(tensor.vocabulary_parallel_loss, torch.zeros(1, 2, 2), torch.tensor([[0, -1]]))
        return refused

    expected = [
        "ValueError: The 10 outputs of the linear layer cannot be cut into equal parts for 4 ranks: 10 / 4 leaves 2 over. "
        "Use 2 ranks, or a size that 4 divides, such as 12.",
        "ValueError: The 7 inputs of the linear layer cannot be cut into equal parts for 4 ranks: 7 / 4 leaves 3 over. "
        "Use 1 rank, or a size that 4 divides, such as 8.",
        "ValueError: parts [4, 4] sum to 8, but",
        "TypeError: A whole nn.Linear is needed, to be cut here, not None",
        "TypeError: An MLP with up, down, gate, dropout is needed, named so, not a Linear without up, down, gate, dropout.",
        "ValueError: 4 ranks, but only 2 key and value heads: each rank needs a whole one",
        "ValueError: The 6 query heads cannot be cut into equal parts for 4 ranks",
        "ValueError: The 50,257 tokens of the vocabulary cannot be cut into equal parts for 4 ranks",
        "ValueError: The 5 positions of the sequence cannot be cut",
        "TypeError: x must be a floating-point tensor, not 3",
        "ValueError: x must be a tensor of (..., 2), this rank's part of the inputs alone, not of (2, 8).",
        "ValueError: x must be a tensor of (..., 8), all inputs, not None (a NoneType).",
        "ValueError: The sequence has 13 tokens; this model takes 1 to 12: its position table",
        "ValueError: The 6 positions of the sequence cannot be cut",
        "ValueError: The module drops out 10%, so random must be RandomStates",
        "TypeError: sequence_parallel must be True or False, not 1",
        "ValueError: seed must be a whole number",
        "ValueError: largest must be a number above 0",
        "IndexError: tokens holds a number that is not a token: the vocabulary has 8, 0 to 7.",
        "IndexError: tokens holds a number that is not a token: the vocabulary has 8, 0 to 7.",
        "TypeError: tokens must be whole numbers",
        "ValueError: targets (1, 3) must hold one token",
        "TypeError: targets must be a torch.int64 tensor",
        "IndexError: targets holds a number that is not a token: 0 to 7 are.",
        "IndexError: targets holds a number that is not a token: 0 to 7 are.",
    ]
    for refused in run(program, ranks=4).results:
        assert len(refused) == len(expected)
        for got, start in zip(refused, expected):
            assert got.startswith(start), got
