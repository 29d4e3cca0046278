"""Vocabulary, random states, norm: what is the same on all ranks under tensor parallel, and what is refused."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from tensor_tools import SMALL, calls, close, close_block, mine, noise, stirred  # noqa: E402
from torch import nn  # noqa: E402
from torch.profiler import record_function  # noqa: E402

from lessons_lib import models, run, shapes  # noqa: E402
from lessons_lib.parallel import tensor  # noqa: E402

WORLDS = (1, 2, 4)

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
        attempt(tensor.ColumnParallelLinear, nn.Linear(4, 12), parts=[16, -4])
        attempt(tensor.ColumnParallelLinear, nn.Linear(4, 12), parts=3)
        attempt(tensor.ParallelDropout, 1.0, None)
        attempt(tensor.ParallelDropout, 0.5, None)
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
        "ValueError: parts must be a list of sizes above 0 that sum to the layer's 12 outputs, not [4, 4].",
        "ValueError: parts must be a list of sizes above 0 that sum to the layer's 12 outputs, not [16, -4].",
        "ValueError: parts must be a list of sizes above 0 that sum to the layer's 12 outputs, not 3.",
        "ValueError: p must be a number from 0 up to",
        "TypeError: stream must be states.replicated or states.sharded",
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


# ---- without the course ----------------------------------------------------------------------------------------------------

PROGRAM = """import os
import sys
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from lessons_lib.parallel import tensor

dist.init_process_group("gloo")
rank, n = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
up, down, whole = nn.Linear(6, 8), nn.Linear(8, 4), torch.randn(3, 2, 6)
y = down(F.gelu(up(whole)))
targets = torch.tensor([[0, 3], [1, 2], [3, 1]])
loss = F.cross_entropy(y.flatten(0, 1), targets.flatten())
a, b = tensor.ColumnParallelLinear(up, enter=tensor.gather_sequence), tensor.RowParallelLinear(down, leave=tensor.scatter_sequence)
z = tensor.gather_sequence(b(F.gelu(a(whole.chunk(n, 1)[rank]))))
assert torch.allclose(z, y, atol=1e-6)
got = tensor.vocabulary_parallel_loss(z.chunk(n, 2)[rank].contiguous(), targets)
assert torch.allclose(got, loss)
assert tensor.gradient_norm(a) == 0
others = [m for m in sys.modules if m.startswith("lessons_lib.") and "parallel" not in m]
print(f"rank {rank} of {n}: {others}\\n", end="")
dist.barrier()
sys.stdout.flush()
os._exit(0)  # gloo's threads, taken down while others still use theirs, may abort a rank that is done
"""


@pytest.mark.skipif(sys.platform == "win32", reason="torchrun needs libuv, which some builds of torch for Windows lack")
def test_it_runs_under_torchrun_as_it_is(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    root, loopback = Path(__file__).resolve().parents[2], "lo0" if sys.platform == "darwin" else "lo"
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback}
    ran = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert sorted(ran.stdout.strip().splitlines()) == ["rank 0 of 2: []", "rank 1 of 2: []"]
