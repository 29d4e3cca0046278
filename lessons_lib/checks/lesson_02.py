"""Exercises of lesson 02, collectives: what each practises, and its hints."""

from __future__ import annotations

from .exercise import Exercise
from .judge_rings import judge_left_all_gather, judge_left_all_reduce, judge_left_reduce_scatter, judge_pass_left
from .judge_trees import judge_tree_broadcast, judge_two_node_all_reduce

NOTEBOOK = "02_collectives.ipynb"

EXERCISES = (
    Exercise(
        "pass_left", ("mine",), NOTEBOOK, "warm-up", 5, "one step of a ring", judge_pass_left,
        (
            "Who is to the left of rank 0? In Python, -1 % 5 is 4.",
            "If every rank first waits in a send, nobody receives: lesson 01 has two cures, and only one works for three "
            "ranks in one step.",
            "isend to (rank - 1) % n and keep the handle; recv from (rank + 1) % n into a new buffer; wait for the handle.",
        ),
    ),
    Exercise(
        "left_all_gather", ("mine", "length"), NOTEBOOK, "easy", 10, "the second half of the ring", judge_left_all_gather,
        (
            "In the first step each rank passes on its own piece; in every later one, the piece that it received last.",
            "Cut an empty buffer with tensor_split(n): its pieces share the buffer's memory, and have the right sizes. "
            "Write down, for rank 0, "
            "which piece arrives in step 0, 1, 2.",
            "In step s, rank r sends piece (r + s) % n to the left and receives piece (r + s + 1) % n from the right.",
        ),
    ),
    Exercise(
        "left_reduce_scatter", ("x",), NOTEBOOK, "medium", 15, "the first half of the ring", judge_left_reduce_scatter,
        (
            "A piece travels once round the ring, and every rank adds its own numbers to it. Where must it end, and so, "
            "where must it start?",
            "Piece p ends at rank p and moves to the left: its last stop before is p + 1, its first one p - 1. So which "
            "piece does rank r send "
            "first?",
            "In step s, rank r sends piece (r + 1 + s) % n to the left, receives piece (r + 2 + s) % n from the right into "
            "a new buffer, and adds "
            "it to its own.",
        ),
    ),
    Exercise(
        "left_all_reduce", ("x",), NOTEBOOK, "medium", 10, "the whole ring, out of its halves", judge_left_all_reduce,
        (
            "You have written both halves already.",
            "After the first half rank r holds the finished piece r. Which arguments does the second half need?",
            "What the first half returns is the second half's `mine`; its other argument is the length of the whole x.",
        ),
    ),
    Exercise(
        "tree_broadcast", ("x", "root"), NOTEBOOK, "hard", 20, "a logarithmic number of steps", judge_tree_broadcast,
        (
            "After one step two ranks have x. How many can have it after the next, if both of them send?",
            "Count ranks from the root: me = (rank - root) % n. In the round with distance d, those with me < d have x and "
            "send to me + d.",
            "For d = 1, 2, 4, ... below n: if me < d and me + d < n, send to the rank of me + d; if d <= me < 2d, receive "
            "from that of me - d. The "
            "rank of someone is (someone + root) % n.",
        ),
    ),
    Exercise(
        "two_node_all_reduce", ("x", "per_node"), NOTEBOOK, "challenge", 30, "fast links inside, a slow one across",
        judge_two_node_all_reduce,
        (
            "The network is 36 times slower than NVLink. What is the least that must cross it?",
            "Reduce-scatter inside each node: then each of its k ranks holds 1/k of the node's sum. Only this has to meet "
            "its counterpart on the "
            "other node, and all k can do that at once.",
            "Reduce-scatter among the node's ranks; swap your piece with the rank in the same place on the other node, and "
            "add; all-gather among "
            "the node's ranks. Your functions for the left ring work with other neighbours, too.",
        ),
    ),
)  # fmt: skip
