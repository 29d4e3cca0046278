"""Exercises of lesson 04, tensor parallel: what each practises, and its hints."""

from __future__ import annotations

from .exercise import Exercise
from .judge_layers import judge_gated_mlp, judge_heads_of_rank, judge_row_product
from .judge_replicated import judge_drop, judge_norm_of_copies
from .judge_sequence import judge_sequence_parallel_mlp
from .judge_vocabulary import judge_split_cross_entropy

NOTEBOOK = "04_tensor_parallel.ipynb"

EXERCISES = (
    Exercise(
        "drop", ("x", "p", "seed", "alike"), NOTEBOOK, "warm-up", 5, "random numbers that are the same, or are not", judge_drop,
        (
            "Two generators with the same seed draw the same numbers. What may differ between ranks, when they should draw others?",
            "generator = torch.Generator().manual_seed(...) is a stream of its own; torch.rand(x.shape, generator=generator) draws "
            "from it. Numbers below p are dropped.",
            "Seed with `seed` if alike, else with a number made of the seed and the rank. Keep x where torch.rand is at least "
            "p, zero "
            "elsewhere, and multiply by 1 / (1 - p).",
        ),
    ),
    Exercise(
        "row_product", ("x", "weight", "bias"), NOTEBOOK, "easy", 10, "a linear layer by rows, its bias once", judge_row_product,
        (
            "Every rank makes a part of a sum. Which columns of nn.Linear's weight belong to its part of the inputs, and when "
            "is the "
            "bias due?",
            "The pieces of the inputs are those of tensor_split, along dimension 1 of the weight. The bias goes where it is added "
            "once and every rank still has its gradient.",
            "mine = weight.tensor_split(n, dim=1)[rank]; y = F.linear(x, mine); all-reduce y in place; return y + bias.",
        ),
    ),
    Exercise(
        "norm_of_copies", ("gradients", "copies"), NOTEBOOK, "easy", 10, "counting what several ranks hold once",
        judge_norm_of_copies,
        (
            "A tensor that four ranks hold is summed four times. What must each of the four put into the sum, so that it counts "
            "once?",
            "Squares add up: over the tensors of a rank, then over ranks. The root comes last.",
            "total = the sum over (gradient, k) of gradient.square().sum() / k; all-reduce that number; its root.",
        ),
    ),
    Exercise(
        "heads_of_rank", ("qkv", "heads", "kv_heads", "size"), NOTEBOOK, "medium", 15, "cutting a fused matrix by heads",
        judge_heads_of_rank,
        (
            "The matrix is three: heads * size rows of Q, then kv_heads * size of K, then as many of V. Cut each by itself.",
            "Query head q attends with key and value head q // (heads // kv_heads). Which of these do this rank's query heads "
            "use, and "
            "what if two ranks use the same one?",
            "Split qkv into Q, K, V; this rank's query heads are heads / n from rank * heads / n on; its first key head is that "
            "of its "
            "first query head, its last that of its last one. Concatenate the three.",
        ),
    ),
    Exercise(
        "gated_mlp", ("x", "gate", "up", "down"), NOTEBOOK, "medium", 20, "the conjugate pair around a whole MLP", judge_gated_mlp,
        (
            "Cut gate and up so that each rank makes some of the hidden numbers, and down so that these are all it needs. Where "
            "is the "
            "one sum forward, and where the one backward?",
            "x is used by every rank, so its gradient is a sum over ranks; autograd does not see that. A "
            "torch.autograd.Function whose "
            "forward is the identity can do it in its backward, once for both products.",
            "Enter.apply(x) once (forward: x.view_as(x); backward: the all-reduced clone of the gradient); rows of gate and up, "
            "columns of down, by tensor_split; then all-reduce what down gives, in place: its backward is the identity.",
        ),
    ),
    Exercise(
        "split_cross_entropy", ("logits", "targets", "first"), NOTEBOOK, "hard", 25, "a loss over a vocabulary that nobody "
        "holds whole",
        judge_split_cross_entropy,
        (
            "loss = log(sum of exp(logits)) - logit of the target. Which of these numbers needs other ranks, and how many "
            "numbers a "
            "token is that?",
            "Three all-reduced numbers a token: the largest logit (MAX, without gradient), the sum of exponentials after "
            "subtracting "
            "it, the target's logit, which one rank has and the others add 0 for. Tokens with target -100 count neither above "
            "nor below.",
            "largest = logits.detach().amax(1), all-reduced with MAX; shifted = logits - largest[:, None]; stack "
            "shifted.exp().sum(1) "
            "and torch.where(inside, the gathered shifted, 0.0); all-reduce the stack; mean of log(sum) - target over the "
            "tokens that "
            "count.",
        ),
    ),
    Exercise(
        "sequence_parallel_mlp", ("x", "norm", "up", "down"), NOTEBOOK, "challenge", 40, "sequence parallel, and what it keeps "
        "in memory",
        judge_sequence_parallel_mlp,
        (
            "First make it right: norm, gather, up, relu, down, reduce-scatter; each call's backward is the other; norm's "
            "gradient is "
            "summed over ranks. Then ask what autograd keeps, and which of it is a copy of what the ranks hold anyway.",
            "Write gather and the first product as one torch.autograd.Function that saves its own part of x and the weight, and "
            "gathers "
            "once more in backward. For norm's gradient, a Function that is the identity forward and an all-reduce backward, put "
            "around the weight, does it.",
            "backward(ctx, gradient): gather the saved part again to get the gradient of up, gradient.T @ gathered; the "
            "gradient of "
            "the part is the reduce-scatter of gradient @ up. relu keeps its output, which down keeps, too: they are one tensor.",
        ),
    ),
)  # fmt: skip
