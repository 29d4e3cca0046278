"""Exercises of lesson 03, data parallel: what each practises, and its hints."""

from __future__ import annotations

from .exercise import Exercise
from .judge_averages import judge_average_by_count, judge_average_in_one_call, judge_average_over_microbatches
from .judge_overlap import judge_overlapped_backward
from .judge_replicas import judge_adopt_best
from .judge_zero import judge_sharded_step

NOTEBOOK = "03_data_parallel.ipynb"

EXERCISES = (
    Exercise(
        "average_by_count", ("gradient", "samples"), NOTEBOOK, "warm-up", 5, "a mean over samples, not over ranks",
        judge_average_by_count,
        (
            "Four ranks have 4, 4, 4 and 1 samples. By how much does one sample of the last rank count in a mean of the ranks' "
            "means?",
            "samples * gradient is the sum over a rank's samples. What is the sum of these over all ranks to be divided by, and "
            "who "
            "knows that number?",
            "All-reduce the number of samples (in a tensor of its own), then all-reduce samples / total * gradient, a new "
            "tensor, and "
            "return that.",
        ),
    ),
    Exercise(
        "adopt_best", ("model", "loss"), NOTEBOOK, "easy", 10, "replicas that are alike in everything", judge_adopt_best,
        (
            "Two questions: who has the lowest loss, and what belongs to a model besides what trains?",
            "Gather the losses, a number each: every rank then finds the same winner. print(list(model.state_dict())) shows what "
            "the model holds: what of it is not among model.parameters()?",
            "best = the position of the smallest of the gathered losses; then for every tensor of model.parameters() and "
            "model.buffers(), dist.broadcast(tensor.detach(), best), which fills it in place.",
        ),
    ),
    Exercise(
        "average_in_one_call", ("model", "samples"), NOTEBOOK, "easy", 10, "one buffer, one latency", judge_average_in_one_call,
        (
            "A rank with few samples, a rank with none, and nobody knows the sum: what could the ranks send so that one sum "
            "answers "
            "everything?",
            "Sum samples x gradient, and at the end of the same buffer sum the samples themselves. What stands in the buffer for a "
            "parameter without gradient? It needs its room, or the others lie in another place.",
            "torch.cat of samples * p.grad.reshape(-1) (or zeros) for each p that requires a gradient, and of one number, samples; "
            "all_reduce; divide all by the last number; cut it with split and set p.grad to each piece, viewed as p.",
        ),
    ),
    Exercise(
        "average_over_microbatches", ("model", "microbatches", "samples"), NOTEBOOK, "medium", 10,
        "accumulate, then synchronise once", judge_average_over_microbatches,
        (
            "backward() adds to p.grad. So what must each loss be multiplied by, for the sum to be the mean over all samples?",
            "A microbatch's loss is the mean over its own len(microbatch) samples; in the whole it should count for "
            "len(microbatch) of "
            "`samples`. And when is p.grad complete?",
            "For each microbatch: (model(microbatch) * len(microbatch) / samples).backward(). After the last one, and only there, "
            "all-reduce every p.grad.",
        ),
    ),
    Exercise(
        "sharded_step", ("weights", "gradient", "momentum", "largest"), NOTEBOOK, "hard", 25,
        "an optimiser step on sharded states (ZeRO-1)", judge_sharded_step,
        (
            "A rank only updates its own piece. So which piece of the averaged gradient does it need, and what do the others need "
            "from it?",
            "Reduce-scatter the padded gradients (dist.reduce_scatter_single), so that each rank gets the sum of its own piece; "
            "the norm of "
            "the whole is the root of a sum of squares over ranks; all-gather the new weights (dist.all_gather_single).",
            "mine = reduce-scatter of the padded gradient, / n; square = mine.square().sum(), all-reduced; multiply mine by "
            "largest / norm if that is below 1; momentum = 0.5 * momentum + mine; piece = my weights - 0.25 * momentum; all-gather "
            "the pieces and cut the padding off.",
        ),
    ),
    Exercise(
        "overlapped_backward", ("model", "samples"), NOTEBOOK, "challenge", 30, "hiding all-reduces behind backward",
        judge_overlapped_backward,
        (
            "A gradient is complete long before backward ends. p.register_post_accumulate_grad_hook(f) calls f(p) at that moment: "
            "what could you start there, and what must you not wait for?",
            "A list of gradients that wait, and a list of all-reduces that fly. When enough bytes wait, lay them into one "
            "buffer and "
            "start its all-reduce with async_op=True. Fill the list in the order in which hooks are called, not in that of "
            "model.parameters().",
            "In the hook: waiting.append(p); if the waiting ones have a few million numbers, cat their gradients, start the "
            "all-reduce, keep (parameters, buffer, handle). After backward: start the rest; wait for each handle, cut its buffer, "
            "divide by n, set p.grad. Then try several sizes.",
        ),
    ),
)  # fmt: skip
