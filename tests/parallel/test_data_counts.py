"""Data parallel by hand: as many calls and bytes as theory says; memory of each rank; overlap; what is refused."""

import pytest

torch = pytest.importorskip("torch")
import data_programs as programs  # noqa: E402
from data_programs import BLOCK, PARAMETERS, REPLICATED, SAMPLES, SHARDED, STEPS, trained  # noqa: E402
from parts import part  # noqa: E402
from torch import nn  # noqa: E402

from lessons_lib import formulas, replay, run  # noqa: E402
from lessons_lib.errors import RankFailed  # noqa: E402
from lessons_lib.hardware import Cluster, Device, Link  # noqa: E402
from lessons_lib.parallel import data  # noqa: E402
from lessons_lib.parallel.buckets import cut_into_buckets  # noqa: E402
from lessons_lib.recording import COLLECTIVE, COMPUTE, WAIT  # noqa: E402

TENSORS = len(list(programs.model_of().parameters()))


def calls(recording, rank=0):
    """(kind, bytes) of the rank's collectives, in order."""
    events = recording.events[rank]
    return [(recording.ops[e["op"]], int(e["nbytes"])) for e in events if e["kind"] == COLLECTIVE]


def total(found, kind):
    return sum(nbytes for name, nbytes in found if name == kind)


def padded(elements, ranks):
    return -(-elements // ranks) * ranks


# ---- calls and bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", SAMPLES)
def test_replicated_ways_send_the_gradients_once_in_as_many_calls_as_said(ranks):
    once = 8 * PARAMETERS  # tied logits and embedding are one
    expected = {"one message a parameter": TENSORS, "flat": 1, "accumulated, flat": 1}
    for way in (*REPLICATED, "ddp"):
        for rank in range(ranks):
            found = calls(part(trained(ranks), way), rank)
            assert {kind for kind, _ in found} - {"broadcast"} == {"all_reduce"}
            assert total(found, "all_reduce") == STEPS * once
            if way in expected:
                assert len(found) == STEPS * expected[way]
    sent = formulas.bytes_sent("all_reduce", once, ranks)
    assert sent == pytest.approx(2 * (ranks - 1) / ranks * once)


@pytest.mark.parametrize("ranks", SAMPLES)
def test_buckets_and_ddp_side_by_side(ranks):
    """The same bytes in all-reduces every step; DDP's first step has one bucket, for it learns the order from it."""
    once, ours = 8 * PARAMETERS, calls(part(trained(ranks), "buckets"))
    theirs = [call for call in calls(part(trained(ranks), "ddp")) if call[0] == "all_reduce"]
    assert theirs[0] == ("all_reduce", once)
    parameters = list(programs.model_of().parameters())
    for found, steps in ((ours, STEPS), (theirs[1:], STEPS - 1)):
        each, left = divmod(len(found), steps)
        assert left == 0
        for step in range(steps):
            assert total(found[step * each : (step + 1) * each], "all_reduce") == once
        assert found == found[:each] * steps  # every step the same calls
    sizes = [8 * sum(p.numel() for p in bucket) for bucket in cut_into_buckets(parameters, programs.BUCKET)]
    assert [nbytes for _, nbytes in ours[: len(sizes)]] == sizes
    # ours close before they are over the size, DDP's once they are (so they are fewer), each but the last
    later = [nbytes for _, nbytes in theirs[1 : 1 + (len(theirs) - 1) // (STEPS - 1)]]
    assert max(sizes) <= programs.BUCKET <= min(later[:-1]) and len(later) <= len(sizes)


@pytest.mark.parametrize("ranks", SAMPLES)
def test_sharded_ways_send_what_zero_says(ranks):
    rest = PARAMETERS - 4 * BLOCK
    one_unit, by_unit = padded(PARAMETERS, ranks), 4 * padded(BLOCK, ranks) + padded(rest, ranks)
    expected = {  # way: (calls and elements of reduce-scatter, calls and elements of all-gather) a step
        "zero1": ((1, one_unit), (1, one_unit)),
        "zero2": ((5, by_unit), (5, by_unit)),
        "zero3": ((5, by_unit), (9, by_unit + 4 * padded(BLOCK, ranks))),
    }
    for way, (scattered, gathered) in expected.items():
        found = calls(part(trained(ranks), way))
        for kind, (number, elements) in (("reduce_scatter", scattered), ("all_gather", gathered)):
            assert [name for name, _ in found].count(kind) == STEPS * number
            assert total(found, kind) == STEPS * 8 * elements
        assert {name for name, _ in found} == {"reduce_scatter", "all_gather"}


def sent_in_a_step(ranks, way):
    return sum(formulas.bytes_sent(kind, nbytes, ranks) for kind, nbytes in calls(part(trained(ranks), way))) / STEPS


@pytest.mark.parametrize("ranks", [2, 4])  # sizes divide: nothing is padded
def test_bytes_sent_are_two_or_three_times_those_of_the_gradients(ranks):
    gradients, share = 8 * PARAMETERS, (ranks - 1) / ranks
    for way in (*REPLICATED, "zero1", "zero2"):
        assert sent_in_a_step(ranks, way) == pytest.approx(2 * share * gradients)
    in_blocks = 4 * BLOCK / PARAMETERS  # the rest is gathered once, not twice
    assert sent_in_a_step(ranks, "zero3") == pytest.approx((2 + in_blocks) * share * gradients)
    assert 0.9 < in_blocks < 1


@pytest.mark.parametrize("ranks", [2, 4])
def test_zero3_makes_the_calls_that_fsdp2_makes(ranks):
    everything = calls(trained(ranks))
    first, last = [i for i, (kind, _) in enumerate(everything) if kind == "barrier"][-2:]
    ours, theirs = calls(part(trained(ranks), "zero3")), everything[first + 1 : last]
    assert sorted(ours) == sorted(theirs) and len(ours) == STEPS * (9 + 5)


# ---- memory ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", SAMPLES)
def test_memory_of_each_rank_is_what_the_zero_formulas_say(ranks):
    rest = PARAMETERS - 4 * BLOCK
    one_unit, by_unit = padded(PARAMETERS, ranks), 4 * padded(BLOCK, ranks) + padded(rest, ranks)
    for found in trained(ranks).results:
        for way in SHARDED:
            whole, counts = one_unit if way == "zero1" else by_unit, found[way][1]
            mine = whole // ranks
            assert counts["shards"] == mine and counts["states"] == 2 * mine and counts["gradient shards"] == mine
            assert counts["gradients after backward"] == (PARAMETERS if way == "zero1" else 0)
            assert counts["parameters"] == counts["parameters after backward"] == (0 if way == "zero3" else whole)
            one_block = padded(BLOCK, ranks) + padded(rest, ranks)  # ZeRO-3 has one block at a time, and what is in none
            assert counts["most parameters"] == (one_block if way == "zero3" else whole)
        if PARAMETERS % ranks == BLOCK % ranks == 0:
            # bytes a parameter where weights and gradients take 2 bytes, and shards (the master copy) and Adam's moments 4
            def priced(counts, gradients):
                return (2 * counts["parameters"] + 2 * counts[gradients] + 4 * (counts["shards"] + counts["states"])) / PARAMETERS

            assert priced(found["zero1"][1], "gradients after backward") == 4 + 12 / ranks
            assert priced(found["zero2"][1], "gradient shards") == 2 + 14 / ranks
            # ZeRO-3 keeps its part of the weights in 2 bytes besides the master copy: 16 / n. Ours has the one shard.
            assert priced(found["zero3"][1], "gradient shards") == 14 / ranks


# ---- overlap -------------------------------------------------------------------------------------------------------------------


def overlapped(recording, rank=0):
    """(all-reduces issued without waiting, those among them with computing before their wait)"""
    events = recording.events[rank]
    flying = [i for i, e in enumerate(events) if e["kind"] == COLLECTIVE and not e["blocking"]]
    waits = {int(e["target"]): i for i, e in enumerate(events) if e["kind"] == WAIT}
    return len(flying), sum(any(events[j]["kind"] == COMPUTE for j in range(i + 1, waits[i])) for i in flying)


@pytest.mark.parametrize("ranks", SAMPLES)
def test_buckets_fly_while_backward_computes(ranks):
    number = len(cut_into_buckets(list(programs.model_of().parameters()), programs.BUCKET))
    assert number > 5
    for way in ("buckets", "accumulated, buckets"):  # one synchronisation, also of two microbatches
        flying, hidden = overlapped(part(trained(ranks), way))
        assert flying == STEPS * number and hidden >= STEPS * (number - 1)
    assert overlapped(part(trained(ranks), "flat")) == (0, 0)


@pytest.mark.parametrize("flops", [1e9, 1e10])  # FLOP/s: backward takes far longer than the all-reduces
def test_the_replay_exposes_the_whole_flat_buffer_and_only_the_last_buckets(flops):
    cluster = Cluster(Device(flops, 1e30, 1e30, 1.0), devices_per_node=2, intra_node=Link(2e9, 1e-6))
    exposed = {}
    for way in ("flat", "buckets"):
        breakdown = replay(part(trained(2), way), cluster).breakdown()
        exposed[way] = {round(communication / STEPS, 12) for _, _, communication, _ in breakdown}
    model = programs.model_of()
    # backward's last matrix products are those of the first qkv: a bucket that needs it, or what comes before it, is not hidden
    late = {model.blocks[0].attention.qkv.bias, model.blocks[0].attention.qkv.weight, model.embedding.tokens.weight}
    sizes = [
        8 * sum(p.numel() for p in bucket)
        for bucket in cut_into_buckets(list(model.parameters()), programs.BUCKET)
        if late & set(bucket)
    ]
    assert len(sizes) == 2
    whole, last = (sum(formulas.ring_all_reduce(size, 2, 2e9, 1e-6) for size in buffers) for buffers in ([8 * PARAMETERS], sizes))
    for way, expected in (("flat", whole), ("buckets", last)):
        assert min(exposed[way]) == max(exposed[way]) == pytest.approx(expected, rel=1e-6)
    assert last < whole / 4


def test_buckets_hold_each_parameter_once_and_no_more_than_allowed():
    parameters = list(programs.model_of().parameters()) + [nn.Parameter(torch.ones(5))]
    for nbytes in (1, 1000, 200_000, 10**9):
        buckets = cut_into_buckets(parameters, nbytes)
        assert sorted(id(p) for bucket in buckets for p in bucket) == sorted(map(id, parameters))
        for bucket in buckets:
            assert len({p.dtype for p in bucket}) == 1
            assert len(bucket) == 1 or sum(p.numel() * p.element_size() for p in bucket) <= nbytes
    assert len(cut_into_buckets(parameters, 1)) == len(parameters) and len(cut_into_buckets(parameters, 10**9)) == 2


# ---- what is refused -------------------------------------------------------------------------------------------------------------


def refused(call):
    with pytest.raises(RankFailed) as caught:
        run(call, ranks=1)
    return str(caught.value)


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan"), float("inf"), True, None, "half"])
def test_a_share_that_is_none_is_refused(share):
    with pytest.raises(ValueError, match=r"share is .*, but must be a number from 0 to 1"):
        data.average_gradients([nn.Parameter(torch.ones(1))], share)


@pytest.mark.parametrize("max_norm", [0, -1.0, float("nan"), True, None, "1"])
def test_a_norm_that_is_none_is_refused(max_norm):
    with pytest.raises(ValueError, match="max_norm is .*, but must be a positive number"):
        data.clip_gradients(max_norm, [nn.Parameter(torch.ones(1))])


def test_other_bad_input_is_refused_by_a_sentence():
    p, frozen = nn.Parameter(torch.ones(1)), torch.ones(1)
    for call, words in (
        (lambda: data.average_gradients(None, 1.0), "must be a model or a list of parameters, not None"),
        (lambda: data.average_gradients(p, 1.0), r"give \[parameter\]"),
        (lambda: data.average_gradients([3], 1.0), "parameters holds 3"),
        (lambda: data.average_gradients([frozen], 1.0), "none that trains"),
        (lambda: data.clip_gradients(1.0, [p], [p]), "among both"),
        (lambda: data.accumulate_gradients(None, [frozen]), "loss_of must be a function"),
        (lambda: data.accumulate_gradients(sum, []), "microbatches must be a list of one tensor or more"),
        (lambda: data.accumulate_gradients(sum, [frozen[:0]]), r"have \[0\] samples"),
        (lambda: data.broadcast_parameters(p), "must be an nn.Module"),
        (lambda: data.share_of_batch(-1), "samples is -1"),
        (lambda: data.share_of_batch(True), "samples is True"),
        (lambda: data.Buckets([p], 0), "bucket_bytes is 0"),
        (lambda: data.Buckets([p], 1.5), "bucket_bytes is 1.5"),
        (lambda: data.units_of(nn.Linear(2, 2), [nn.Linear(2, 2)]), "must be a list of parts of the model"),
        (lambda: data.units_of(nn.Linear(2, 2), []), "must be a list of parts of the model"),
        (lambda: data.units_of(p, []), "must be an nn.Module"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            call()


def test_units_keep_tied_parameters_with_the_rest():
    model = programs.model_of()
    units, rest = data.units_of(model, [model.embedding, *model.blocks])
    assert [sum(p.numel() for p in unit) for unit in units] == [64 * 64, BLOCK, BLOCK, BLOCK, BLOCK]
    assert sum(p.numel() for p in rest) == 128 * 64 + 2 * 64  # the table of tokens, which the logits share; the last norm


def test_bad_input_on_ranks_is_refused():
    def program():
        data.split_batch(torch.tensor(3.0))

    assert "batch must be a tensor with the samples along its first dimension" in refused(program)

    def mixed():
        data.FlatUnit([nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1, dtype=torch.float64))])

    assert "torch.float32, torch.float64, but one buffer has one dtype" in refused(mixed)

    def early(way, *modules):
        def program():
            model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
            model[1].unused = nn.Parameter(torch.ones(1))  # so backward completes no more than one unit
            zero = getattr(data, way)(model, *([[model[0]]] if modules else []), lambda shards: torch.optim.SGD(shards, lr=1.0))
            model(torch.ones(1, 2)).sum().backward()
            zero.step()

        return program

    for way, modules in (("Zero1", ()), ("Zero2", (0,)), ("Zero3", (0,))):
        assert "step() was called before reduce_gradients()" in refused(early(way, *modules))

    def no_optimizer():
        data.Zero1(nn.Linear(2, 2), None)

    assert "make_optimizer must be a function of the shards" in refused(no_optimizer)
