"""Replayed times against pencil and paper, against closed forms, and against a slow second opinion."""

import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from recordings import random_program, scan

from lessons_lib import formulas
from lessons_lib.errors import Deadlock, Mismatch
from lessons_lib.hardware import H100, IB_NDR, NVLINK4, Cluster, Device, Link
from lessons_lib.recording import COMPUTE, Operator, RankLog, Recording
from lessons_lib.replay import measured, replay

DEVICE = Device(flops=1e9, memory=1e9, memory_bandwidth=1e9, efficiency=1.0)
LINK = Link(bandwidth=1000.0, latency=0.5)  # 1000 bytes take 1.5 s
SLOW = Link(bandwidth=100.0, latency=2.0)
CLUSTER = Cluster(DEVICE, nodes=1, devices_per_node=16, intra_node=LINK, inter_node=SLOW)
SECOND = 1e9  # FLOPs that take one second


def logs(ranks):
    return [RankLog(r, ranks) for r in range(ranks)]


def run(*programs, cluster=CLUSTER, **options):
    return replay(Recording.from_logs(programs), cluster, **options)


def transfers(timeline):
    return [(t.start, t.end, t.ranks) for t in timeline.transfers]


def kinds(timeline, rank):
    return [(s.kind, s.start, s.end) for s in timeline.spans if s.rank == rank]


# ---- pencil and paper ----------------------------------------------------------------------------------------------------


def test_compute_is_the_larger_of_flops_and_bytes_plus_overhead_for_each_operator():
    device = Device(flops=100.0, memory=1, memory_bandwidth=10.0, efficiency=0.5, launch_overhead=0.25)
    (a,) = logs(1)
    a.compute(flops=100, nbytes=5, count=3)  # 2 s of flops, 0.5 s of bytes: 3 x 2.25
    a.compute(flops=10, nbytes=30)  # 0.2 s, 3 s: 3.25
    a.compute(flops=0, nbytes=0, count=4)  # 4 x 0.25
    assert run(a, cluster=Cluster(device)).step_time == pytest.approx(6.75 + 3.25 + 1.0, rel=1e-12)


def test_a_message():
    a, b = logs(2)
    a.compute(flops=SECOND, label="forward")
    a.send(1, 1000)
    b.recv(0, 1000)
    b.compute(flops=3 * SECOND)
    t = run(a, b)
    assert t.step_time == pytest.approx(1 + 1.5 + 3, rel=1e-9)
    assert kinds(t, 0) == [("compute", 0, 1), ("communication", 1, 2.5), ("idle", 2.5, 5.5)]
    assert kinds(t, 1) == [("idle", 0, 1), ("communication", 1, 2.5), ("compute", 2.5, 5.5)]
    assert [(s.label, s.detail) for s in t.spans if s.rank == 0] == [
        ("forward", ""), ("send", "send 1.0 kB to rank 1"), ("finished", "finished"),
    ]  # fmt: skip
    assert t.breakdown() == [(0, 1.0, 1.5, 3.0), (1, 3.0, 1.5, 1.0)]
    assert [(s.rank, s.kind, s.start, s.end) for s in t.critical_path()] == [
        (0, "compute", 0, 1), (1, "communication", 1, 2.5), (1, "compute", 2.5, 5.5),
    ]  # fmt: skip
    (moved,) = t.transfers
    assert (moved.start, moved.end, moved.ranks, moved.label, moved.nbytes) == (1.0, 2.5, (0, 1), "send", 1000)
    assert t.kind == "replayed" and t.title == "2 ranks on a device over a link (1 kB/s)"


@pytest.mark.parametrize("n", [2, 3, 7, 16])
def test_a_chain(n):
    programs = logs(n)
    for r, log in enumerate(programs):
        if r:
            log.recv(r - 1, 300 * r)
        log.compute(flops=SECOND / 2)
        if r < n - 1:
            log.send(r + 1, 300 * (r + 1))
    expected = n * 0.5 + sum(0.5 + 0.3 * (r + 1) for r in range(n - 1))
    t = run(*programs)
    assert t.step_time == pytest.approx(expected, rel=1e-9)
    path = t.critical_path()
    assert [s.kind for s in path] == ["compute"] + ["communication", "compute"] * (n - 1)


def test_an_exchange_uses_both_directions_at_once():
    a, b = logs(2)
    for me, other in ((a, 1), (b, 0)):
        handle = me.send(other, 1000, blocking=False)
        me.recv(other, 1000)
        me.wait(handle)
    t = run(a, b)
    assert t.step_time == pytest.approx(1.5, rel=1e-9)
    assert transfers(t) == [(0, 1.5, (0, 1)), (0, 1.5, (1, 0))]


def test_an_overlapped_send_is_hidden_by_compute():
    a, b = logs(2)
    handle = a.send(1, 1000, blocking=False)
    a.compute(flops=SECOND)
    a.wait(handle)
    b.recv(0, 1000)
    t = run(a, b)
    assert t.step_time == pytest.approx(1.5, rel=1e-9)
    assert kinds(t, 0) == [("compute", 0, 1), ("communication", 1, 1.5)]
    a.compute(flops=SECOND)  # after the wait
    assert run(a, b).step_time == pytest.approx(2.5, rel=1e-9)


def test_a_wait_for_what_has_ended_takes_no_time():
    a, b = logs(2)
    handle = a.send(1, 1000, blocking=False)
    a.compute(flops=2 * SECOND)
    a.wait(handle)
    a.wait(handle)
    b.recv(0, 1000)
    assert kinds(run(a, b), 0) == [("compute", 0, 2)]


def test_a_message_waits_for_its_receiver():
    a, b = logs(2)
    a.send(1, 1000)
    b.compute(flops=4 * SECOND)
    b.recv(0, 1000)
    t = run(a, b)
    assert t.step_time == pytest.approx(5.5, rel=1e-9)
    assert kinds(t, 0) == [("idle", 0, 4), ("communication", 4, 5.5)]


def test_a_send_that_nobody_waits_for_still_takes_its_time():
    a, b = logs(2)
    a.send(1, 1000, blocking=False)
    b.recv(0, 1000, blocking=False)
    t = run(a, b)
    assert t.step_time == pytest.approx(1.5, rel=1e-9)
    assert t.breakdown() == [(0, 0.0, 0.0, 1.5), (1, 0.0, 0.0, 1.5)]  # both have finished
    assert [(s.start, s.end, s.kind) for s in t.critical_path()] == [(0, 1.5, "communication")]


@pytest.mark.parametrize("op", formulas.COLLECTIVES)
@pytest.mark.parametrize("algorithm", formulas.ALGORITHMS)
def test_a_collective_starts_with_its_last_member_and_takes_its_closed_form(op, algorithm):
    programs = logs(5)
    for r, log in enumerate(programs):
        log.compute(flops=SECOND * (r + 1) / 2)
        log.collective(op, 4000, root=0 if op in ("broadcast", "reduce", "gather", "scatter") else -1)
    t = run(*programs, algorithm=algorithm)
    expected = formulas.collective_time(op, 4000, 5, CLUSTER, algorithm)
    assert t.step_time == pytest.approx(2.5 + expected, rel=1e-9)
    assert kinds(t, 0) == [("compute", 0, 0.5), ("idle", 0.5, 2.5), ("communication", 2.5, t.step_time)]
    assert t.transfers[0].ranks == (0, 1, 2, 3, 4) and t.transfers[0].label == op


def test_an_asynchronous_collective_overlaps():
    programs = logs(2)
    for log in programs:
        handle = log.collective("all_reduce", 1000, blocking=False)  # 2 x (0.5 + 0.5) = 2 s
        log.compute(flops=SECOND)
        log.wait(handle)
    assert run(*programs).breakdown() == [(0, 1.0, 1.0, 0.0), (1, 1.0, 1.0, 0.0)]


def test_members_of_a_group_on_their_own_links():
    cluster = Cluster(DEVICE, nodes=2, devices_per_node=2, intra_node=LINK, inter_node=SLOW)
    programs = logs(4)
    for log in programs:
        log.collective("all_reduce", 4000)
    t = run(*programs, cluster=cluster)
    assert t.step_time == pytest.approx(2 * (0.5 + 2.0) + 2 * (2.0 + 10.0), rel=1e-9)  # inside both ways, 2000 bytes across 2 nodes
    programs = logs(4)
    for r in (1, 3):
        programs[r].collective("all_gather", 400, group=(1, 3))
    assert run(*programs, cluster=cluster).step_time == pytest.approx(2 + 2, rel=1e-9)
    assert t.title == "4 ranks on a device over a link (1 kB/s) and, across nodes, a link (100 B/s)"


def test_a_group_of_one_is_free_and_uses_no_port():
    a, b = logs(2)
    handle = a.send(1, 1000, blocking=False)
    a.collective("all_reduce", 10**9, group=(0,))
    a.wait(handle)
    b.recv(0, 1000)
    assert run(a, b).step_time == pytest.approx(1.5, rel=1e-9)


def test_uneven_all_to_all_takes_the_largest_member():
    a, b = logs(2)
    a.collective("all_to_all", 1000)
    b.collective("all_to_all", 4000)
    assert run(a, b).step_time == pytest.approx(0.5 + 2.0, rel=1e-9)


def test_one_wait_is_one_span_although_more_begins_to_move():
    a, b, c = logs(3)
    first = a.recv(1, 4000, blocking=False)
    second = a.recv(2, 1000, blocking=False)
    third = a.send(2, 1000, blocking=False)
    b.send(0, 4000)  # 0 to 4.5
    c.compute(flops=SECOND)
    c.recv(0, 1000, blocking=False)  # 1 to 2.5, while rank 0 waits for the first
    c.send(0, 1000)  # 4.5 to 6
    for handle in (first, second, third):
        a.wait(handle)
    t = run(a, b, c)
    assert kinds(t, 0) == [("communication", 0, 4.5), ("communication", 4.5, 6.0)]
    assert [s.detail for s in t.spans if s.rank == 0] == ["recv 4.0 kB from rank 1", "recv 1.0 kB from rank 2"]


# ---- ports ---------------------------------------------------------------------------------------------------------------


def test_two_senders_to_one_receiver_take_turns():
    a, b, c = logs(3)
    a.send(2, 1000)
    b.send(2, 2000)
    for source, nbytes in ((0, 1000), (1, 2000)):
        c.recv(source, nbytes, blocking=False)
    assert transfers(run(a, b, c)) == [(0, 1.5, (0, 2)), (1.5, 4.0, (1, 2))]


def test_one_sender_to_two_receivers_takes_turns():
    a, b, c = logs(3)
    a.send(2, 1000, blocking=False)
    a.send(1, 2000, blocking=False)
    b.recv(0, 2000)
    c.recv(0, 1000)
    assert transfers(run(a, b, c)) == [(0, 1.5, (0, 2)), (1.5, 4.0, (0, 1))]


def test_the_one_that_is_ready_first_goes_first():
    a, b, c, d = logs(4)
    a.send(3, 1000)  # takes the port from 0 to 1.5
    b.compute(flops=SECOND)
    b.send(3, 1000)  # ready at 1
    c.compute(flops=SECOND / 2)
    c.send(3, 1000)  # ready at 0.5
    for source in (0, 1, 2):
        d.recv(source, 1000, blocking=False)
    assert transfers(run(a, b, c, d)) == [(0, 1.5, (0, 3)), (1.5, 3.0, (2, 3)), (3.0, 4.5, (1, 3))]


def test_a_message_overtakes_one_whose_other_port_is_busy():
    a, b, c, d = logs(4)
    a.send(2, 3000)  # keeps the receive port of 2 busy until 3.5
    b.send(2, 1000, blocking=False)  # ready at 0, but that port is busy
    b.compute(flops=SECOND)
    b.send(3, 1000)  # ready at 1: both its ports are free, it need not wait behind the other
    c.recv(0, 3000, blocking=False)
    c.recv(1, 1000, blocking=False)
    d.recv(1, 1000)
    assert transfers(run(a, b, c, d)) == [(0, 3.5, (0, 2)), (1, 2.5, (1, 3)), (3.5, 5.0, (1, 2))]


def test_links_inside_and_across_nodes_have_ports_of_their_own():
    cluster = Cluster(DEVICE, nodes=2, devices_per_node=2, intra_node=LINK, inter_node=SLOW)
    a, b, c = logs(3)
    a.send(1, 1000, blocking=False)
    a.send(2, 1000, blocking=False)
    b.recv(0, 1000)
    c.recv(0, 1000)
    assert transfers(run(a, b, c, cluster=cluster)) == [(0, 1.5, (0, 1)), (0, 12.0, (0, 2))]


def test_a_collective_waits_for_the_ports_of_all_members():
    a, b, c = logs(3)
    a.send(1, 1000, blocking=False)
    b.recv(0, 1000, blocking=False)
    for log in (a, b, c):
        log.collective("broadcast", 500, root=0)  # 2 x 0.5 + 0.5
    t = run(a, b, c)
    assert transfers(t) == [(0, 1.5, (0, 1)), (1.5, 3.0, (0, 1, 2))]
    assert kinds(t, 2) == [("idle", 0, 1.5), ("communication", 1.5, 3.0)]
    assert [(s.label, s.start, s.end) for s in t.critical_path()] == [("send", 0, 1.5), ("broadcast", 1.5, 3.0)]


@pytest.mark.parametrize("n", range(2, 10))
@pytest.mark.parametrize(
    "link", [Link(1e9, 1.0), Link(1.0, 1e-9), Link(1000.0, 0.5), NVLINK4], ids=("latency", "bandwidth", "both", "nvlink")
)
def test_a_ring_written_by_hand_costs_what_the_formula_says(n, link):
    programs, piece = logs(n), 1000
    for r, log in enumerate(programs):
        for _ in range(2 * (n - 1)):
            handle = log.send((r + 1) % n, piece, blocking=False)
            log.recv((r - 1) % n, piece)
            log.wait(handle)
    t = run(*programs, cluster=Cluster(DEVICE, devices_per_node=16, intra_node=link))
    assert t.step_time == pytest.approx(formulas.ring_all_reduce(piece * n, n, link.bandwidth, link.latency), rel=1e-9)
    assert len(t.transfers) == 2 * (n - 1) * n


def test_messages_match_by_order_within_sender_receiver_group_and_tag():
    a, b = logs(2)
    a.send(1, 100, blocking=False, tag=7)
    a.send(1, 200, blocking=False, tag=9)
    a.send(1, 300, blocking=False, tag=7)
    a.send(1, 400, blocking=False, group=(1, 0), tag=7)
    b.recv(0, 400, tag=7, group=(1, 0))
    b.recv(0, 200, tag=9)
    b.recv(0, 100, tag=7)
    b.recv(0, 300, tag=7)
    assert sorted(t.nbytes for t in run(a, b).transfers) == [100, 200, 300, 400]


# ---- properties, on random programs ----------------------------------------------------------------------------------


def setting(seed):
    rng = random.Random(seed)
    ties = rng.random() < 0.4
    ranks = rng.randrange(1, 7)
    recording = random_program(rng, ranks, rng.choice([5, 20, 60, 150]), ties)
    device = Device(1e9, 1e9, 1e9, 1.0, launch_overhead=rng.choice([0, 0.25]))
    intra = Link(1000, rng.choice([0, 0.25]) if ties else rng.random() * 0.5)
    inter = Link(512, 0.5) if ties else Link(700, rng.random())
    return recording, Cluster(device, 6, rng.choice([1, 2, 3, 8]), intra, inter), rng.choice(formulas.ALGORITHMS)


@pytest.mark.parametrize("seed", range(120))
def test_second_opinion(seed):
    recording, cluster, algorithm = setting(seed)
    timeline = replay(recording, cluster, algorithm)
    step_time, moved = scan(recording, cluster, algorithm)
    assert timeline.step_time == pytest.approx(step_time, rel=1e-12)
    mine = sorted(zip(timeline.transfer_columns["start"], timeline.transfer_columns["end"]))
    assert np.allclose(np.array(mine).ravel(), np.array([m[:2] for m in moved]).ravel(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("seed", range(200, 260))
def test_spans_tile_the_step_and_say_what_moves(seed):
    recording, cluster, algorithm = setting(seed)
    t = replay(recording, cluster, algorithm)
    for rank in range(t.world_size):
        spans = [s for s in t.spans if s.rank == rank]
        if t.step_time:
            assert spans[0].start == 0 and spans[-1].end == t.step_time
        assert all(a.end == b.start for a, b in zip(spans, spans[1:]))
        own = [x for x in t.transfers if rank in x.ranks]
        for s in spans:
            if s.kind != "compute" and s.label != "finished":
                middle = (s.start + s.end) / 2
                assert (s.kind == "communication") == any(x.start <= middle < x.end for x in own)
    for _, *parts in t.breakdown():
        assert sum(parts) == pytest.approx(t.step_time, rel=1e-12) and min(parts) >= 0
    path = t.critical_path()
    if t.step_time:
        assert path[0].start == 0 and path[-1].end == t.step_time
        assert all(a.end == b.start for a, b in zip(path, path[1:])) and all(s.kind != "idle" for s in path)
    assert replay(recording, cluster, algorithm).spans == t.spans  # the second time from what was kept


@pytest.mark.parametrize("seed", range(300, 330))
def test_the_step_grows_with_what_is_on_the_critical_path_and_with_nothing_else(seed):
    rng = random.Random(seed)
    recording = random_program(rng, rng.randrange(2, 6), 60)
    cluster = Cluster(DEVICE, 6, rng.choice([1, 2, 8]), Link(1000, rng.random()), Link(700, rng.random()))
    before = replay(recording, cluster)
    on_path = {(s.rank, s.start) for s in before.critical_path() if s.kind == "compute"}
    tried = 0
    for rank, (events, costs) in enumerate(zip(recording.events, recording.costs)):
        spans = [s for s in before.spans if s.rank == rank and s.kind == "compute"]
        rows = [costs[e["first_cost"]] for e in events if e["kind"] == COMPUTE]
        rows = [row for row in rows if row["count"]]  # no span without an operator
        assert len(rows) == len(spans)
        for row, span in zip(rows, spans):
            old = recording.operators[row["operator"]]
            recording.operators[row["operator"]] = Operator(old.name, old.flops + 1000, old.nbytes + 1000)  # 1 us more
            grown = replay(recording, cluster).step_time - before.step_time
            recording.operators[row["operator"]] = old
            expected = 1e-6 * row["count"] if (rank, span.start) in on_path else 0
            assert grown == pytest.approx(expected, abs=1e-9)
            tried += 1
    assert tried


# ---- what cannot be replayed --------------------------------------------------------------------------------------------


def test_both_send_first():
    a, b = logs(2)
    a.send(1, 8, line="cell 3, line 5: dist.send(x, 1)")
    a.recv(1, 8)
    b.send(0, 8, line="cell 3, line 8: dist.send(x, 0)")
    b.recv(0, 8)
    with pytest.raises(Deadlock) as error:
        run(a, b)
    text = str(error.value)
    assert "rank 0 waits in send to rank 1" in text and "rank 1 waits in send to rank 0" in text
    assert "cell 3, line 5" in text and "cell 3, line 8" in text and "isend" in text


def test_a_message_that_is_never_received():
    a, b = logs(2)
    handle = a.send(1, 8, blocking=False)
    a.wait(handle, line="cell 1, line 2: h.wait()")
    b.compute(flops=1)
    with pytest.raises(Deadlock, match="(?s)rank 0 waits in .*send to rank 1.*cell 1, line 2.*rank 1 has finished"):
        run(a, b)


def test_a_collective_that_one_rank_never_calls():
    programs = logs(3)
    for log in programs[:2]:
        log.collective("barrier", 0)
    with pytest.raises(Deadlock, match="rank 0 waits in barrier.* rank 2 has finished"):
        run(*programs)


def test_a_circle_of_receives():
    programs = logs(4)
    for r, log in enumerate(programs):
        log.recv((r + 1) % 4, 8)
        log.send((r - 1) % 4, 8)
    with pytest.raises(Deadlock) as error:
        run(*programs)
    assert all(f"rank {r} waits in recv from rank {(r + 1) % 4}" in str(error.value) for r in range(4))


def test_sizes_that_differ_name_both_sides():
    a, b = logs(2)
    a.send(1, 4, line="cell 1, line 4")
    b.recv(0, 8, line="cell 1, line 7")
    with pytest.raises(Mismatch, match="rank 0 sends 4 bytes to rank 1 .*line 4.*receives 8 bytes .*line 7"):
        run(a, b)


@pytest.mark.parametrize(
    "other, words",
    [
        (lambda log: log.collective("all_reduce", 32, line="B"), "rank 0 calls all_reduce of 20 bytes .*A.* rank 2 .* of 32 bytes"),
        (lambda log: log.collective("broadcast", 20, root=0, line="B"), "rank 2 calls broadcast of 20 bytes with root 0 .*B"),
    ],
)  # fmt: skip
def test_collectives_that_differ_name_both_sides(other, words):
    programs = logs(3)
    for log in programs:
        log.collective("barrier", 0)
    programs[0].collective("all_reduce", 20, line="A")
    programs[1].collective("all_reduce", 20, line="A")
    other(programs[2])
    with pytest.raises(Mismatch, match=f"number 2 of the group .*{words}"):
        run(*programs)


def test_different_roots_are_a_mismatch():
    a, b = logs(2)
    a.collective("broadcast", 8, root=0)
    b.collective("broadcast", 8, root=1)
    with pytest.raises(Mismatch, match="root 0.*root 1"):
        run(a, b)


@pytest.mark.parametrize(
    "spoil, words",
    [
        (lambda log: log.send(0, 8), "from a rank to itself"),
        (lambda log: log.send(5, 8), "not a rank from 0 to 1"),
        (lambda log: log.recv(-1, 8), "not a rank from 0 to 1"),
        (lambda log: log.send(1, -8), "fewer than 0 bytes"),
        (lambda log: log.send(1, 8, group=(0,)), "peer that is not a member"),
        (lambda log: log.collective("all_reduce", 8, group=(1,)), "its rank is not a member"),
        (lambda log: log.collective("all_reduce", 8, group=(0, 9)), "different ranks from 0 to 1"),
        (lambda log: log.collective("allreduce", 8), "none of the collectives that replay knows: all_reduce"),
        (lambda log: log.wait(0), "waits for no earlier event"),
        (lambda log: log.wait(log.compute(flops=1)), "no communication"),
    ],
)  # fmt: skip
def test_malformed_events_are_named(spoil, words):
    a, b = logs(2)
    spoil(a)
    with pytest.raises(ValueError, match=words):
        run(a, b)


def test_arguments_that_do_not_fit():
    recording = Recording.from_logs(logs(4))
    for arguments, error, words in (
        ((recording, Cluster(H100, devices_per_node=2)), ValueError, "4 ranks.*only 2 devices"),
        ((recording, H100), TypeError, "hardware.Cluster"),
        ((recording, None), TypeError, "hardware.Cluster"),
        ((None, CLUSTER), TypeError, "Recording, not NoneType"),
        ((test_a_message, CLUSTER), TypeError, r"Recording, not function; run\(program\)"),
        ((recording, CLUSTER, "star"), ValueError, "'star'"),
        ((Recording(0, [], [], [], [], [], [], []), CLUSTER), ValueError, "0 ranks"),
        ((Recording(1, [np.zeros(3)], [np.zeros(3)], [], [], [], [], []), CLUSTER), TypeError, "recording.EVENT"),
    ):
        with pytest.raises(error, match=words):
            replay(*arguments)


def test_an_empty_program_takes_no_time():
    t = run(*logs(3))
    assert t.step_time == 0 and t.spans == [] and t.transfers == [] and t.critical_path() == []
    assert t.breakdown() == [(r, 0.0, 0.0, 0.0) for r in range(3)]


def test_editing_a_recording_in_place_is_noticed():
    a, b = logs(2)
    a.send(1, 1000)
    b.recv(0, 1000)
    recording = Recording.from_logs([a, b])
    assert replay(recording, CLUSTER).step_time == 1.5
    for events in recording.events:
        events["nbytes"] = 2000
    assert replay(recording, CLUSTER).step_time == 2.5


def test_replaying_needs_neither_torch_nor_a_plotting_library():
    code = "import sys, lessons_lib.replay; print(sorted({'torch', 'matplotlib', 'ipywidgets'} & set(sys.modules)))"
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_the_title_names_device_and_links():
    assert run(*logs(4), cluster=Cluster(H100)).title == "4 ranks on H100 over NVLink 4 (450 GB/s)"
    assert run(*logs(2), cluster=Cluster(H100, 2, 1)).title == "2 ranks on H100 over InfiniBand NDR (50 GB/s)"
    assert IB_NDR.name in run(*logs(9), cluster=Cluster(H100, 2)).title


# ---- measured times -----------------------------------------------------------------------------------------------------


def test_measured_times_in_the_same_form():
    a, b = logs(2)
    a.compute(flops=1, label="forward", start=0.0, end=1.0)
    a.send(1, 1000, start=1.0, end=4.0)
    b.compute(flops=1, label="load", start=0.5, end=1.0)
    b.compute(flops=1, label="prepare", start=1.0, end=2.0)
    b.recv(0, 1000, start=2.0, end=4.5)
    b.compute(flops=1, start=4.5, end=6.0)
    t = measured(Recording.from_logs([a, b]))
    assert t.kind == "measured" and t.step_time == 6.0
    assert kinds(t, 0) == [("compute", 0, 1), ("idle", 1, 2), ("communication", 2, 4), ("idle", 4, 6)]
    assert [(s.kind, s.start, s.end, s.label) for s in t.spans if s.rank == 1] == [
        ("compute", 0, 1, "load"), ("compute", 1, 2, "prepare"), ("communication", 2, 4.5, "recv"), ("compute", 4.5, 6, ""),
    ]  # fmt: skip
    assert transfers(t) == [(2.0, 4.0, (0, 1))]
    assert t.breakdown() == [(0, 1.0, 2.0, 3.0), (1, 3.5, 2.5, 0.0)]
    path = t.critical_path()
    assert path[0].start == 0 and path[-1].end == 6.0 and all(x.end == y.start for x, y in zip(path, path[1:]))


def test_measured_waits_and_collectives():
    a, b = logs(2)
    for log, late in ((a, 0.0), (b, 1.0)):
        handle = log.collective("all_reduce", 8, blocking=False, start=1.0 + late, end=1.1 + late)
        log.compute(flops=1, start=1.1 + late, end=3.0)
        log.wait(handle, start=3.0, end=3.5 + late)
    t = measured(Recording.from_logs([a, b]))
    assert transfers(t) == [(2.0, 4.5, (0, 1))]
    assert kinds(t, 0) == [("compute", 0, 3), ("communication", 3, 3.5), ("idle", 3.5, 4.5)]
    assert kinds(t, 1) == [("compute", 0, 3), ("communication", 3, 4.5)]


def test_measured_needs_times():
    a, b = logs(2)
    a.send(1, 8)
    b.recv(0, 8)
    with pytest.raises(ValueError, match="no measured times.*replay"):
        measured(Recording.from_logs([a, b]))
    with pytest.raises(ValueError, match="shapes only"):
        measured(Recording.from_logs([a, b], shapes_only=True))
    with pytest.raises(TypeError, match="Recording"):
        measured(None)


def test_a_large_recording_replays():
    programs = logs(8)
    for _ in range(500):
        for r, log in enumerate(programs):
            log.compute(flops=SECOND)
            handle = log.send((r + 1) % 8, 500, blocking=False)
            log.recv((r - 1) % 8, 500)
            log.wait(handle)
    t = run(*programs)
    assert t.step_time == pytest.approx(500 * 2.0, rel=1e-9)
    assert len(t.spans) == 8 * 500 * 2
