"""Bytes to whole lines, and lines to an order that does not depend on speed."""

import os
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from lessons_lib.ranks.printing import ERR, LINE_LENGTH, LINES_KEPT, MESSAGE, OTHER, OUT, Allowance, Assembler, Channel, Order

TOKEN = b"\x01token\x02!"


def sent(write) -> bytes:
    """All bytes that `write(channel)` sends."""
    reading, writing = os.pipe()
    with ThreadPoolExecutor() as pool, os.fdopen(reading, "rb") as file:
        data = pool.submit(file.read)
        with os.fdopen(writing, "wb"):
            write(Channel(writing, TOKEN))
        return data.result()


def test_prints_messages_and_foreign_bytes_come_apart_in_order():
    def write(channel):
        out = channel.text_stream(OUT)
        channel.position = lambda: 3
        print("one", end="", file=out)
        os.write(channel.fd, b"from C\nhalf")
        channel.position = lambda: 5
        print(" two", file=out)
        channel.message(**{"is": "done"})
        print("left \u00e9\u4e2d", end="", file=out)
        out.flush()

    data = sent(write)
    found = Assembler(TOKEN).feed(data, final=True)
    assert found == [
        (OTHER, 0, "from C"),
        (OUT, 5, "one two"),
        (MESSAGE, 5, '{"is": "done"}'),
        (OTHER, 5, "half"),
        (OUT, 5, "left \u00e9\u4e2d"),
    ]


@pytest.mark.parametrize("seed", range(20))
def test_any_cut_of_the_bytes_gives_the_same_lines(seed):
    rng = random.Random(seed)
    texts = ["".join(rng.choice("ab\u00e9\u4e2d\U0001f600") for _ in range(rng.choice([0, 1, 7, 600]))) for _ in range(30)]

    def write(channel):
        streams = {OUT: channel.text_stream(OUT), ERR: channel.text_stream(ERR)}
        for number, text in enumerate(texts):
            channel.position = lambda number=number: number
            print(text, file=streams[OUT if number % 3 else ERR])

    data = sent(write)
    assembler, found, at = Assembler(TOKEN), [], 0
    while at < len(data):
        size = rng.choice([1, 2, 5, 13, 1000])
        found += assembler.feed(data[at : at + size])
        at += size
    found += assembler.feed(b"", final=True)
    assert found == [(OUT if n % 3 else ERR, n, text) for n, text in enumerate(texts)]


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        (b"10%\r50%\r100%\n", "100%"),
        (b"\rstep 1\rstep 2\r\n", "step 2"),
        (b"dos\r\n", "dos"),
        (b"\r\r\n", ""),
        (b"\xff!\n", "\ufffd!"),
    ],
)
def test_carriage_returns_and_broken_bytes(written, shown):
    assert Assembler(TOKEN).feed(written) == [(OTHER, 0, shown)]


def test_a_long_line_is_cut_and_says_so():
    assembler, size = Assembler(TOKEN), 3_000_000
    for _ in range(30):
        assembler.feed(b"x" * (size // 30))
        assert len(assembler.partial[OTHER].kept) <= 4 * LINE_LENGTH
    [(_, _, line)] = assembler.feed(b"\n")
    assert line == "x" * LINE_LENGTH + f" ... (about {size - LINE_LENGTH:,} more characters)"


def test_a_message_is_never_cut():
    found = Assembler(TOKEN).feed(sent(lambda channel: channel.message(text="y" * 200_000)))
    assert found == [(MESSAGE, 0, '{"text": "' + "y" * 200_000 + '"}')]


def test_the_allowance_counts_what_it_leaves_out():
    allowance = Allowance()
    kept = [allowance.admits(str(n)) for n in range(LINES_KEPT + 7)]
    assert kept == [True] * LINES_KEPT + [False] * 7
    assert allowance.notice().startswith("... 7 more lines left out")


# ---- order ---------------------------------------------------------------------------------------------------------------


def test_ranks_that_do_the_same_alternate_and_nothing_is_held():
    order, shown = Order(2), []
    for rank, line in [(1, "a1"), (0, "a0"), (0, "b0"), (1, "b1")]:
        order.add(rank, 4, line, arrival=0.0)
        shown += order.release({0: 4, 1: 4}, held_since=-1.0)
    # rank 1's next line has number 2, so rank 0's lines 0 and 1 are safe, and so is rank 1's line 0 and 1
    assert shown == [(0, "a0"), (1, "a1"), (0, "b0"), (1, "b1")]


def test_a_line_waits_for_a_slower_rank_and_not_for_one_that_ended():
    order = Order(3)
    order.add(1, 5, "fast", arrival=0.0)
    assert order.release({0: 2, 1: 9}, held_since=-1.0) == []
    assert order.release({0: 6, 1: 9}, held_since=-1.0) == [(1, "fast")]
    order.add(2, 7, "late", arrival=0.0)
    assert order.release({}, held_since=-1.0) == [(2, "late")]


def test_a_line_that_was_held_too_long_takes_earlier_ones_along():
    order = Order(2)
    order.add(1, 5, "old", arrival=1.0)
    order.add(1, 3, "cannot be earlier than its own rank's last", arrival=2.0)
    order.add(0, 1, "new but earlier", arrival=2.0)
    assert order.release({0: 1, 1: 1}, held_since=1.5) == [(0, "new but earlier"), (1, "old")]
    assert order.output() == [(0, "new but earlier"), (1, "old"), (1, "cannot be earlier than its own rank's last")]


@pytest.mark.parametrize("seed", range(30))
def test_every_speed_gives_the_same_output(seed):
    """Random programs: each rank has a list of (clock, line); ranks advance in random turns; what is shown never changes."""
    rng = random.Random(seed)
    world_size = rng.choice([1, 2, 4, 7])
    programs = []
    for rank in range(world_size):
        clocks = sorted(rng.randrange(12) for _ in range(rng.randrange(15)))
        programs.append([(clock, f"{rank}.{n}") for n, clock in enumerate(clocks)])
    wanted = sorted(
        (clock, [c for c, _ in program[:n]].count(clock), rank, line)
        for rank, program in enumerate(programs)
        for n, (clock, line) in enumerate(program)
    )
    for _ in range(5):
        order, at, shown = Order(world_size), [0] * world_size, []
        while any(at[r] < len(programs[r]) for r in range(world_size)):
            rank = rng.choice([r for r in range(world_size) if at[r] < len(programs[r])])
            clock, line = programs[rank][at[rank]]
            at[rank] += 1
            order.add(rank, clock, line, arrival=0.0)
            bounds = {r: programs[r][at[r]][0] for r in range(world_size) if at[r] < len(programs[r])}
            shown += order.release(bounds, held_since=-1.0)
        assert shown == [(rank, line) for _, _, rank, line in wanted]
        assert order.output() == shown
