"""Tensors that do not fit each other are refused on the rank that brings them, before anything moves."""

import itertools
import random
import re

import pytest
import torch
import torch.distributed as dist

from lessons_lib import BufferMisuse, RankFailed, RunError, run
from lessons_lib.recorder.pieces import pieces, shared

QUICK = {"timeout": 30.0}


def rows(*shape, dtype=torch.float32):
    return torch.ones(*shape, dtype=dtype)


# each is wrong on every rank; plain gloo reads beyond the tensors in the first, and writes fatal checks to the terminal in some
WRONG = {
    "an all_to_all that cannot be divided": (
        lambda n: dist.all_to_all_single(rows(n * 3 + 1), rows(n * 3 + 1)),
        "10 cannot be cut into 3 equal pieces",
    ),
    "split sizes with another sum": (
        lambda n: dist.all_to_all_single(rows(6), rows(6), [2, 2, 2], [1, 2, 2]),
        "the input split sizes are [1, 2, 2]",
    ),
    "too few split sizes": (lambda n: dist.all_to_all_single(rows(6), rows(6), [3, 3], [3, 3]), "There must be 3"),
    "an all_to_all of unequal lists": (
        lambda n: dist.all_to_all([rows(2)] * 3, [rows(2), rows(3), rows(2)]),
        "tensor 1 of the input list is [3] float32",
    ),
    "a short all_to_all list": (lambda n: dist.all_to_all([rows(2)], [rows(2)]), "the output list has 1 tensors, but needs 3"),
    "an all_gather list that is too short": (
        lambda n: dist.all_gather([rows(2), rows(2)], rows(2)),
        "the output list has 2 tensors, but needs 3",
    ),
    "an all_gather into another shape": (
        lambda n: dist.all_gather([rows(2, 2) for _ in range(n)], rows(4)),
        "tensor 0 of the output list is [2, 2] float32",
    ),
    "an all_gather into too large a tensor": (
        lambda n: dist.all_gather_into_tensor(rows(9, 2), rows(2, 2)),
        "the output must be [6, 2] float32",
    ),
    "an all_gather into another dtype": (
        lambda n: dist.all_gather_into_tensor(rows(6, dtype=torch.float64), rows(2)),
        "the output must be [6] float32",
    ),
    "a reduce_scatter of too much": (lambda n: dist.reduce_scatter_tensor(rows(2), rows(7)), "the input must be [6] float32"),
    "a reduce_scatter list": (lambda n: dist.reduce_scatter(rows(4), [rows(3), rows(4), rows(5)]), "here is [3] float32"),
    "a message to itself": (lambda n: dist.isend(rows(2), dist.get_rank()).wait(), "Rank 0 sends to, or receives from, itself"),
    "a receive from itself": (lambda n: dist.recv(rows(2), dist.get_rank()), "Rank 0 sends to, or receives from, itself"),
    "a sparse tensor": (lambda n: dist.all_reduce(torch.eye(3).to_sparse()), "x.to_dense()"),
    "a group of nobody": (lambda n: dist.new_group([]), "name at least one rank"),
    "a group with a rank that is not there": (lambda n: dist.new_group([0, 7]), "Rank 7 is out of range"),
    "a group with a rank twice": (lambda n: dist.new_group([0, 0, 1]), "duplicate"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_does_not_fit_is_refused(what, capsys):
    call, says = WRONG[what]

    def program():
        call(dist.get_world_size())

    with pytest.raises(RankFailed) as caught:
        run(program, ranks=3, **QUICK)
    text = str(caught.value)
    assert text.startswith("rank 0 raised") and says in text and "test_pieces.py, line " in text
    assert "gloo" not in text and "Check failed" not in text and " at 0x" not in text
    printed = capsys.readouterr()
    assert not re.search(r"\[rank \d\] ", printed.out + printed.err)


@pytest.mark.parametrize(
    "call,says",
    [
        (lambda n, root: dist.gather(rows(2), [rows(2)] if root else None, dst=1), "the output list has 1 tensors"),
        (lambda n, root: dist.scatter(rows(2), [rows(3)] * n if root else None, src=1), "tensor 0 of the input list is [3]"),
    ],
)
def test_lists_of_the_root(call, says):
    def program():
        call(dist.get_world_size(), dist.get_rank() == 1)

    with pytest.raises(RankFailed, match="rank 1 raised") as caught:
        run(program, ranks=3, **QUICK)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "call,says",
    [
        (lambda x, n: dist.all_gather([torch.zeros(4)] * n, x), r"\[torch.zeros\(k\) for _ in range\(n\)\]"),
        (lambda x, n: dist.all_to_all_single(x, x), "torch.empty_like"),
        (lambda x, n: dist.all_to_all(list(x.chunk(n)), list(x.chunk(n))), "torch.empty_like"),
    ],
)
def test_outputs_that_share_memory_are_refused(call, says):
    def program():
        call(torch.ones(4), dist.get_world_size())

    with pytest.raises(BufferMisuse, match=says) as caught:
        run(program, ranks=2, **QUICK)
    assert "Rank 0" in str(caught.value) and "test_pieces.py, line" in str(caught.value)


def test_what_fits_still_works():
    """Neighbours in one storage, an output that contains the input, uneven pieces, no elements, no dimensions, one rank."""

    def program():
        rank, n = dist.get_rank(), dist.get_world_size()
        whole = torch.zeros(n * 3)
        whole[rank * 3 : rank * 3 + 3] = rank + 1
        parts = list(whole.chunk(n))
        dist.all_gather(parts, parts[rank])
        dist.all_gather_into_tensor(torch.empty(0), torch.empty(0))
        points = [torch.zeros(()) for _ in range(n)]
        dist.all_gather(points, torch.tensor(float(rank)))
        uneven = [torch.ones(k + 1) for k in range(n)]
        mine = torch.zeros(rank + 1)
        dist.reduce_scatter(mine, uneven)
        sent, got = [k + rank for k in range(n)], [rank + k for k in range(n)]
        out = torch.zeros(sum(got))
        dist.all_to_all_single(out, torch.full((sum(sent),), float(rank)), got, sent)
        return whole.tolist(), [p.item() for p in points], mine.tolist(), out.tolist()

    for n in (1, 2, 3):
        for rank, (whole, points, mine, out) in enumerate(run(program, ranks=n, **QUICK).results):
            assert whole == [float(k + 1) for k in range(n) for _ in range(3)]
            assert points == list(map(float, range(n))) and mine == [float(n)] * (rank + 1)
            assert out == [float(k) for k in range(n) for _ in range(rank + k)]


def test_the_same_without_data():
    def program():
        dist.all_to_all_single(torch.ones(7), torch.ones(7))

    with pytest.raises(RunError, match="7 cannot be cut into 2 equal pieces"):
        run(program, ranks=2, shapes_only=True)


@pytest.mark.parametrize("seed", range(10))
def test_pieces_are_those_of_torch_split(seed):
    choose = random.Random(seed)
    n = choose.randint(1, 5)
    sizes = [choose.randint(0, 4) for _ in range(n)]
    tensor = torch.zeros(sum(sizes), *[choose.randint(1, 3) for _ in range(choose.randint(0, 2))])
    assert pieces("x", "input", tensor, sizes, n) == tuple(t.numel() for t in torch.split(tensor, sizes))
    even = torch.zeros(3 * n, 2)
    assert pieces("x", "input", even, (), n) == tuple(t.numel() for t in even.chunk(n))


@pytest.mark.parametrize("seed", range(20))
def test_sharing_is_found_by_comparing_all_pairs(seed):
    choose = random.Random(seed)
    storages = [torch.zeros(60), torch.zeros(60)]
    tensors, covered = ([], []), ([], [])
    for _ in range(choose.randint(2, 6)):
        which, low = choose.randrange(2), choose.randrange(0, 50)
        high, side = low + choose.choice((0, 3, 8)), choose.randrange(2)
        tensors[side].append(storages[which][low:high])
        covered[side].append({(which, i) for i in range(low, high)})
    outputs, inputs = covered
    wanted = {kind for a, b in itertools.combinations(outputs, 2) if a & b for kind in ["outputs"]}
    wanted |= {"input" for a, b in itertools.product(outputs, inputs) if a & b}
    assert shared(*tensors) in (wanted or {""})


def test_columns_are_refused_for_what_they_are():
    def program():
        dist.all_gather(list(torch.zeros(4, 2).unbind(1)), torch.ones(4))

    with pytest.raises(BufferMisuse, match="not contiguous"):
        run(program, ranks=2, **QUICK)
