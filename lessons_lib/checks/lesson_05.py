"""Exercises of lesson 05, pipeline parallel: what each practises, and its hints."""

from __future__ import annotations

from .exercise import Exercise
from .judge_memory import judge_within_memory
from .judge_pipelines import judge_run_order
from .judge_schedules import judge_microbatches_needed, judge_order_of_rank, judge_three_by_four
from .judge_stages import judge_balance, judge_sum_tied

NOTEBOOK = "05_pipeline_parallel.ipynb"

EXERCISES = (
    Exercise(
        "three_by_four", (), NOTEBOOK, "warm-up", 10, "a schedule is a table: who waits for whom", judge_three_by_four,
        (
            "Begin with rank 0: in which slots can it run F0, F1, F2, F3? When has each of them reached rank 2?",
            "Look at the lesson's pictures under 'Microbatches' and '1F1B'. Forwards go down one rank a slot, backwards come up "
            "one rank a slot, and the last rank may run B of a microbatch right after its F.",
            "All forwards first: rank 0 is through with them after slot 3, rank 2 after slot 5. Then rank 2 runs B0 in slot 6, "
            "rank 1 in slot 7, rank 0 in slot 8, and the others follow.",
        ),
    ),
    Exercise(
        "microbatches_needed", ("p", "most_idle"), NOTEBOOK, "easy", 5, "the two definitions of the bubble",
        judge_microbatches_needed,
        (
            "There are two numbers for a bubble: over the ideal time, and over the whole step. Which one is asked for?",
            "Both are in the lesson under 'Count the bubble': p-1 slots of work are lost. Write down the share of the whole step, "
            "say that it is at most most_idle, and ask what that demands of m. What should come out for p = 1?",
            "(p-1)/(m+p-1) <= most_idle means that m is at least (p-1)(1 - most_idle)/most_idle: rounded up, and never below 1. "
            "math.ceil rounds up.",
        ),
    ),
    Exercise(
        "order_of_rank", ("rank", "p", "m"), NOTEBOOK, "easy", 15, "1F1B: warm-up, steady state, cool-down", judge_order_of_rank,
        (
            "How many forwards can a rank run before its first gradient comes back? The last rank runs one, and the one before "
            "it?",
            "The lesson names three phases under '1F1B'. Write them down for ranks 0 and 3 of 4: how long is each, and which of it "
            "depends on the rank, which on m? What if there are fewer microbatches than a warm-up would take?",
            "Warm-up: w = p - 1 - rank forwards, or m if there are fewer. Then a forward and a backward in turns, until no forward "
            "is left: which microbatch has its backward when F(w + i) has just run? Then the w backwards that are left.",
        ),
    ),
    Exercise(
        "sum_tied", ("stage",), NOTEBOOK, "medium", 10, "tied embeddings on two stages", judge_sum_tied,
        (
            "In one process the table is used twice, and its gradient is the sum of both. Which ranks hold a part of it here?",
            "Look at 'One weight on two stages': a group of the first and the last rank can sum among themselves. Who has to "
            "call dist.new_group, and what if there is one rank, so that both are the same?",
            "With one rank return at once. Else every rank calls ends = dist.new_group([0, n - 1]); the two of them then call "
            "dist.all_reduce(stage.table.grad, group=ends).",
        ),
    ),
    Exercise(
        "balance", ("costs", "p"), NOTEBOOK, "medium", 20, "uneven stages: the slowest sets the pace", judge_balance,
        (
            "Do not ask for the best cut at once. Could p stages do it if none may cost more than, say, 20?",
            "For a given limit, fill each stage until the next layer would exceed it: that takes the fewest stages. Which limits "
            "can be the answer, and what if fewer than p stages were needed?",
            "Try limits from the largest single cost upwards. For each, begin a new stage when the next layer would exceed the "
            "limit, or when only as many layers are left as there are stages to fill. The first limit that needs at most p "
            "stages is the best.",
        ),
    ),
    Exercise(
        "run_order", ("order", "stage", "inputs", "targets"), NOTEBOOK, "hard", 30, "a pipeline on real ranks", judge_run_order,
        (
            "Go through `order` with a dictionary: what F made for microbatch i is kept until B of i needs it.",
            "The lesson's forward_step and backward_step have all parts. F: take inputs[i], or receive x and let it require a "
            "gradient; send what comes out, detached, with isend. B: receive the gradient of what you sent, call backward with "
            "it, send x.grad.",
            "On the last rank what is kept is the loss, mean_loss(y, targets[i]) * len(inputs[i]) / (samples of all inputs), and "
            "its backward needs no gradient. Wait for a send only at the end: two ranks that wait for each other's send wait for "
            "ever.",
        ),
    ),
    Exercise(
        "within_memory", ("p", "m", "in_flight", "split"), NOTEBOOK, "challenge", 45, "a schedule for the memory you have",
        judge_within_memory,
        (
            "Let time run slot by slot: whoever is free takes what is ready, and takes no F while it keeps `in_flight` "
            "microbatches. What is written down in which order is then the schedule.",
            "Note for every rank when its F, B and W of each microbatch end. Ready is F if the rank before has it, B if the rank "
            "after has it, W if the own B has it. A microbatch is kept until B, or until W where backward is split. Which comes "
            "first if several are ready?",
            "B first, then F, then W is par at most sizes; where backward is split and in_flight is less than m, it can be a few "
            "slots behind. Let F come first, but only while fewer than p - rank microbatches are between their F and their B, as "
            "in 1F1B; then B, then W.",
        ),
    ),
)  # fmt: skip
