"""Exercises of lesson 01, devices and links: what each practises, and its hints."""

from __future__ import annotations

from .exercise import Exercise
from .judge_messages import judge_exchange, judge_multiply_while_sending, judge_relay, judge_running_total
from .judge_times import judge_fit, judge_transfer_time

NOTEBOOK = "01_devices_and_links.ipynb"

EXERCISES = (
    Exercise(
        "transfer_time", ("nbytes", "gigabits", "microseconds"), NOTEBOOK, "warm-up", 5, "bits, bytes and the two "
        "constants of a link",
        judge_transfer_time,
        (
            "A message takes the latency, plus its size divided by the bandwidth. Bring all three into seconds and bytes, "
            "or seconds and bits.",
            "Look at the lesson under 'Two constants', and at what it says about bits and bytes. There are 8 bits in a byte.",
            "1 us is 1e-6 s, 1 Gbit/s is 1e9 bits per second; the message has 8 * nbytes bits.",
        ),
    ),
    Exercise(
        "exchange", ("mine", "partner"), NOTEBOOK, "easy", 5, "two-way traffic without a deadlock", judge_exchange,
        (
            "Both ranks run the same lines. If both wait in a send, nobody receives.",
            "Look at the lesson's two cures. Whose order depends on the parity of the rank, and what if both partners are even?",
            "Make a buffer with torch.empty_like(mine); start the send with dist.isend and keep its handle; receive; wait "
            "for the handle; "
            "return the buffer.",
        ),
    ),
    Exercise(
        "running_total", ("mine",), NOTEBOOK, "easy", 10, "a chain: who waits for whom", judge_running_total,
        (
            "Rank 2 needs the numbers of ranks 0, 1 and 2. Rank 1 has the first two already, if you let it.",
            "Look at the chain in the lesson: every rank but the first receives, every rank but the last sends. What is "
            "new is what "
            "happens between the two.",
            "Receive the total so far into a new buffer, add `mine` to it, send that on, return it. Rank 0 starts from a "
            "copy of `mine`.",
        ),
    ),
    Exercise(
        "fit", ("sizes", "seconds"), NOTEBOOK, "medium", 15, "latency and bandwidth out of measured times", judge_fit,
        (
            "time = latency + bytes / bandwidth is a straight line in bytes: an intercept and a slope. Which messages pin "
            "down which?",
            "An ordinary line fit makes absolute errors small, and the largest message has the largest. Look at how the "
            "lesson's fit treats "
            "errors.",
            "Divide the equation by the measured time: 1 = latency * (1/t) + (1/bandwidth) * (n/t). That is linear in the "
            "two unknowns: "
            "np.linalg.lstsq with the columns 1/t and n/t.",
        ),
    ),
    Exercise(
        "multiply_while_sending", ("block", "weight", "partner"), NOTEBOOK, "hard", 15, "hiding a message behind computation",
        judge_multiply_while_sending,
        (
            "One of the two products needs no message at all.",
            "A blocking call computes nothing while it waits. Look at isend, irecv and wait: what may stand between the "
            "start and the wait?",
            "Start isend and irecv; compute your own product; wait for the receive; compute the partner's; wait for the send.",
        ),
    ),
    Exercise(
        "relay", ("x",), NOTEBOOK, "challenge", 25, "keeping every link of a chain busy", judge_relay,
        (
            "While the whole of x moves over one link, the others have nothing to do. What if you passed it on in parts?",
            "x.tensor_split(k) gives k pieces that share x's memory, also if k does not divide the length. A rank should "
            "take in the next "
            "piece while the last one is still leaving.",
            "For each piece: receive it (unless you are rank 0), isend it on (unless you are last) and keep the handle; "
            "wait for all handles at "
            "the end. Try several numbers of pieces: few make the last rank wait, many pay the latency often.",
        ),
    ),
)  # fmt: skip
