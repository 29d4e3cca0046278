"""The launcher's watch over notes, without ranks: what it proves, what it does not, and the order it gives to events."""

import itertools
import random
import time

import pytest

from lessons_lib.errors import BufferMisuse, Deadlock, Mismatch
from lessons_lib.watch import GRACE, Watch
from lessons_lib.watch.notes import NoteReader, NoteWriter, Operation


class Ranks:
    """Writes notes as ranks would."""

    def __init__(self, folder, n):
        self.n, self.writers, self.count = n, [NoteWriter(folder, r) for r in range(n)], [0] * n

    def post(self, rank, op, peer=-1, numel=4, tag=0, where="here", name="0", group=None):
        index = self.count[rank]
        self.count[rank] += 1
        group = tuple(range(self.n)) if group is None else group
        op = Operation(op, name, group, peer, tag, (numel,), "float32", numel, "SUM", where, True)
        self.writers[rank].post(index, op)
        return index

    def wait(self, rank, index):
        self.writers[rank].write("wait", index)

    def done(self, rank, index, source=None):
        self.writers[rank].write("done", index, source)

    def block(self, rank, *args, **kwargs):
        self.wait(rank, self.post(rank, *args, **kwargs))


def looks(watch, ended=frozenset(), times=6):
    """What the watch says within a few looks."""
    return next((error for _ in range(times) if (error := watch.poll(ended))), None)


def test_notes_survive_being_read_in_pieces(tmp_path):
    writer, reader = NoteWriter(tmp_path, 0), NoteReader(tmp_path, 0)
    assert reader.read() == []
    writer.write("wait", 1)
    with open(tmp_path / "notes.0", "ab") as file:
        file.write(b'["done",')
    assert reader.read() == [["wait", 1]]
    with open(tmp_path / "notes.0", "ab") as file:
        file.write(b"1,null]\n")
    assert reader.read() == [["done", 1, None]] and writer.position == 1


@pytest.mark.parametrize("n", [2, 3, 7])
def test_a_circle_is_a_deadlock_and_an_open_chain_is_not(tmp_path, n):
    ranks, watch = Ranks(tmp_path, n), Watch(tmp_path, n)
    for rank in range(1, n):
        ranks.block(rank, "recv", peer=rank - 1)
    assert looks(watch) is None  # rank 0 computes and may still send
    ranks.block(0, "recv", peer=n - 1)
    error = looks(watch)
    assert isinstance(error, Deadlock)
    assert all(f"rank {r} waits in recv" in str(error) for r in range(n))


def test_both_sides_posted_is_never_a_deadlock(tmp_path):
    ranks, watch = Ranks(tmp_path, 2), Watch(tmp_path, 2)
    ranks.block(0, "send", peer=1)
    assert looks(watch) is None
    ranks.block(1, "recv", peer=0)
    assert looks(watch) is None


def test_who_waits_for_one_that_has_finished_waits_for_ever(tmp_path):
    ranks, watch = Ranks(tmp_path, 3), Watch(tmp_path, 3)
    ranks.block(0, "all_reduce")
    assert looks(watch, {1}) is not None


def test_a_receive_from_anyone_waits_while_anyone_may_send(tmp_path):
    ranks, watch = Ranks(tmp_path, 3), Watch(tmp_path, 3)
    ranks.block(0, "recv", peer=-1)
    assert looks(watch, {1}) is None
    ranks.block(2, "send", peer=0)
    assert looks(watch, {1}) is None  # this message is for it


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_mismatch_reads_the_same_whoever_came_first(tmp_path, order):
    ranks, watch = Ranks(tmp_path, 3), Watch(tmp_path, 3)
    for rank in order:
        ranks.block(rank, "all_reduce", numel=8 if rank == 1 else 4, where=f"line {rank}")
        watch.poll()
    error = watch.poll(final=True)
    assert isinstance(error, Mismatch)
    assert "Ranks 0 and 1" in str(error) and "line 0" in str(error) and "line 1" in str(error) and "line 2" not in str(error)


@pytest.mark.parametrize("order", [(2, 3, 0, 1), (0, 3, 2, 1), (3, 2, 1, 0)])
def test_of_two_mismatches_the_one_with_the_lowest_rank_is_told(tmp_path, order):
    ranks, watch = Ranks(tmp_path, 4), Watch(tmp_path, 4)
    for rank in order:
        low = rank // 2 * 2
        ranks.block(rank, "all_reduce", numel=rank + 1, name=f"group {low}", group=(low, low + 1))
        watch.poll()
    assert "Ranks 0 and 1" in str(watch.poll(final=True))


def test_others_get_time_to_come_before_a_mismatch_is_told(tmp_path):
    ranks, watch = Ranks(tmp_path, 4), Watch(tmp_path, 4)
    ranks.block(2, "all_reduce", numel=1)
    ranks.block(3, "barrier", numel=0)
    assert watch.poll(ended={0}) is None  # no deadlock either, although rank 0 will never come
    time.sleep(2 * GRACE)
    assert "Ranks 2 and 3 call different collectives" in str(watch.poll(ended={0}))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_who_dropped_a_handle_is_told_the_same_whoever_was_first(tmp_path, order):
    ranks, watch = Ranks(tmp_path, 2), Watch(tmp_path, 2)
    for rank in order:
        ranks.writers[rank].write("drop", ranks.post(rank, "all_reduce"), "all_reduce", "cell 3, line 5")
        watch.poll()
    error = watch.poll(final=True)
    assert isinstance(error, BufferMisuse) and str(error).startswith("Rank 0 threw away") and "cell 3, line 5" in str(error)


def test_who_waits_while_all_have_come_is_not_held(tmp_path):
    ranks, watch = Ranks(tmp_path, 2), Watch(tmp_path, 2)
    ranks.block(0, "all_reduce")
    watch.poll()
    assert watch.held(0) and not watch.held(1)
    ranks.post(1, "all_reduce")
    watch.poll()
    assert not watch.held(0)


def test_a_wait_that_raised_is_no_wait(tmp_path):
    ranks, watch = Ranks(tmp_path, 2), Watch(tmp_path, 2)
    index = ranks.post(0, "recv", peer=1)
    ranks.wait(0, index)
    ranks.writers[0].write("left", index)
    assert looks(watch, ended={1}) is None


def test_messages_match_in_order_by_tag_and_group(tmp_path):
    ranks, watch = Ranks(tmp_path, 2), Watch(tmp_path, 2)
    ranks.post(0, "send", peer=1, numel=1, tag=1)
    ranks.post(0, "send", peer=1, numel=2, tag=2)
    ranks.post(0, "send", peer=1, numel=3, tag=1)
    ranks.post(0, "send", peer=1, numel=5, tag=1, name="other")
    for numel, tag, name in ((2, 2, "0"), (5, 1, "other"), (1, 1, "0"), (3, 1, "0")):
        ranks.post(1, "recv", peer=0, numel=numel, tag=tag, name=name)
    assert looks(watch) is None
    ranks.post(1, "recv", peer=0, numel=9)
    ranks.post(0, "send", peer=1, numel=8)
    assert isinstance(looks(watch), Mismatch)


def test_logical_time_follows_messages(tmp_path):
    """What a rank does after it received comes after what the sender did before it sent, however the notes are read."""
    rng = random.Random(5)
    n, ranks = 4, Ranks(tmp_path, 4)
    watch = Watch(tmp_path, n)
    events = []  # (rank, position) before a send, (rank, position) after its receive
    for _ in range(60):
        a, b = rng.sample(range(n), 2)
        before = ranks.writers[a].position
        send = ranks.post(a, "send", peer=b)
        receive = ranks.post(b, "recv", peer=a)
        for rank, index in ((a, send), (b, receive)):
            ranks.wait(rank, index)
            ranks.done(rank, index)
        events.append((a, before, b, ranks.writers[b].position))
        if rng.random() < 0.5:
            watch.poll()
    watch.poll()
    for a, before, b, after in events:
        assert watch.known(b, after) and watch.clock(a, before) < watch.clock(b, after)
    for rank in range(n):
        clocks = [watch.clock(rank, p) for p in range(ranks.writers[rank].position + 1)]
        assert clocks == sorted(clocks) and watch.now(rank) == clocks[-1]


def test_logical_time_waits_for_the_other_side(tmp_path):
    ranks, watch = Ranks(tmp_path, 2), Watch(tmp_path, 2)
    index = ranks.post(0, "recv", peer=1)
    ranks.wait(0, index)
    ranks.done(0, index)  # read before the sender's note, though written after it
    watch.poll()
    assert not watch.known(0, 3) and watch.known(0, 2)
    ranks.post(1, "send", peer=0)
    watch.poll()
    assert watch.known(0, 3)
