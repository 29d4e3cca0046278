"""Code that is broken in whatever way never breaks the process that checks it, and always gets a sentence."""

import asyncio
import ctypes
import functools
import os
import random
import signal
import sys
import threading
import time
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist

from lessons_lib.checks import NotYet, check
from lessons_lib.checks.trial import PrintsOfRanks

COUNT = 0


def said(answer, exercise="exchange") -> str:
    with pytest.raises(NotYet) as caught:
        check(answer, exercise)
    text = str(caught.value)
    assert len(text) < 8000 and max(map(len, text.splitlines())) < 2100
    assert "check itself failed" not in text
    return text


def good(mine, partner):
    theirs = torch.empty_like(mine)
    sending = dist.isend(mine, partner)
    dist.recv(theirs, partner)
    sending.wait()
    return theirs


class HostileRepr:
    def __repr__(self):
        raise RuntimeError("no")


class HostileError(Exception):
    def __str__(self):
        raise RuntimeError("no")


def raises(error):
    def answer(mine, partner):
        raise error

    return answer


def returns(value):
    return lambda mine, partner: value() if callable(value) else value


def recursion(mine, partner):
    return recursion(mine, partner)


def generator(mine, partner):
    yield mine


async def coroutine(mine, partner):
    await asyncio.sleep(0)


def kills_itself(mine, partner):
    os.kill(os.getpid(), signal.SIGKILL)


def segfault(mine, partner):
    ctypes.string_at(0)


def closes_over_a_lock():
    lock = threading.Lock()

    def answer(mine, partner):
        with lock:
            return good(mine, partner)

    return answer


def destroys_the_group(mine, partner):
    dist.destroy_process_group()
    return good(mine, partner)


def asks(mine, partner):
    return input("number? ")


def checks_itself(mine, partner):
    check(good, "exchange")


def shadows(mine, partner):
    sys.modules.pop("torch.distributed")
    torch.Tensor.numpy = None
    np.array_equal = lambda *_: True
    return mine


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (raises(ZeroDivisionError("by zero")), "raised ZeroDivisionError: by zero"),
        (raises(NotImplementedError), "exchange is still blank"),
        (raises(NotImplementedError()), "exchange is still blank"),
        (raises(NotImplementedError("no such kernel")), "raised NotImplementedError: no such kernel"),
        (raises(HostileError()), "HostileError"),
        (raises(KeyboardInterrupt), "raised KeyboardInterrupt"),
        (raises(ValueError("x" * 10_000_000)), "raised ValueError: xxx"),
        (raises(ValueError("y\n" * 100_000)), "more lines"),
        (lambda mine, partner: sys.exit(), "called sys.exit"),
        (lambda mine, partner: sys.exit(0), "called sys.exit"),
        (lambda mine, partner: sys.exit("bye"), "called sys.exit('bye')"),
        (lambda mine, partner: os._exit(0), "exited with code 0"),
        (kills_itself, "killed by signal 9"),
        (segfault, "killed by signal 11"),
        (recursion, "RecursionError"),
        (generator, "is a generator function, because of its `yield`"),
        (returns(lambda: (n for n in "ab")), "the result is a generator"),
        (coroutine, "is an async function"),
        (closes_over_a_lock(), "is a lock"),
        (returns(threading.Lock), "cannot be sent back"),
        (destroys_the_group, "rank 0"),
        (asks, "EOFError"),
        (checks_itself, "inside rank"),
        (shadows, "rank 0"),
        (returns(None), "returned None"),
        (returns(3), "returned 3 (of type int)"),
        (returns("text" * 1000), "(of type str)"),
        (returns([1.0] * 5), "(of type list)"),
        (returns(HostileRepr), "(of type HostileRepr)"),
        (returns(lambda: np.zeros(5, dtype="float32")), "(of type ndarray)"),
        (returns(lambda: torch.zeros(5, device="meta")), "without plain numbers"),
        (returns(lambda: torch.zeros(5).to_sparse()), "without plain numbers"),
        (returns(lambda: torch.zeros(6)), "shape [6]"),
        (returns(lambda: torch.zeros(())), "shape []"),
        (returns(lambda: torch.full((5,), float("nan"))), "[nan, nan, nan, nan, ...]"),
        (returns(lambda: torch.zeros(5, dtype=torch.complex64)), "dtype complex64"),
        (returns(lambda: torch.zeros(5, requires_grad=True)), "it returned [0, 0, 0, 0, ...]"),
    ],
)
def test_it_gets_a_sentence(answer, words):
    assert words.lower() in said(answer).lower()


@pytest.mark.parametrize(
    "answer",
    [
        lambda mine, partner: [None for _ in iter(int, 1)],
        lambda mine, partner: time.sleep(1000),
        lambda mine, partner: threading.Event().wait(),
    ],
)
def test_an_endless_one_is_stopped_at_the_limit(answer, short_limit):
    start = time.monotonic()
    text = said(answer)
    assert "Your code did not finish within 1 s" in text and "timeout=" not in text
    assert time.monotonic() - start < 60


def prints_much(mine, partner):
    for number in range(200_000):
        print(f"line {number} of a great many")
    return mine


def prints_one_line(mine, partner):
    print("z" * 5_000_000)
    return mine


def test_what_it_prints_is_shown_when_it_fails_and_bounded(capsys):
    text = said(prints_much)
    assert "Your code printed (the first 8 of" in text and "[rank 0] line 0 of a great many" in text
    assert "zzz ..." in said(prints_one_line)
    assert capsys.readouterr().out == ""


def test_a_notebook_shows_it_in_lines_that_break_between_words():
    words = "Not yet: relay.\n  rank 0 waits in " + "send of 3 float32 to rank 2 " * 8 + "\n\n" + "x" * 150
    shown = NotYet(words)._render_traceback_()
    assert shown[0] == "Not yet: relay." and shown[-2:] == ["", "x" * 150]
    assert all(len(line) <= 100 for line in shown[:-1])
    assert shown[1].startswith("  rank 0 ") and shown[2].startswith("    ")
    assert " ".join(" ".join(shown).split()) == " ".join(words.split())
    assert str(NotYet(words)) == words


def test_what_it_prints_is_not_shown_when_it_passes(capsys):
    def chatty(mine, partner):
        print("hello")
        return good(mine, partner)

    check(chatty, "exchange")
    out = capsys.readouterr().out
    assert "hello" not in out and out.endswith("(Your code printed, too; that is shown only while a check fails.)\n")


def test_what_a_run_itself_says_reaches_the_cell(capsys):
    kept = PrintsOfRanks(sys.stdout)
    kept.write("[rank 0] one\n[rank 1] two\n")
    kept.write("Starting 4 ranks ...\n")
    assert kept.getvalue() == "[rank 0] one\n[rank 1] two\n" and capsys.readouterr().out == "Starting 4 ranks ...\n"


def test_nothing_of_this_process_changes():
    def meddles(mine, partner):
        global COUNT
        COUNT += 1
        os.chdir("/")
        os.environ["LESSONS_MEDDLED"] = "yes"
        torch.set_default_dtype(torch.float64)
        random.seed(1)
        warnings.simplefilter("error")
        return good(mine, partner)

    before = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist(), os.getcwd(), sys.stdout)
    filters = list(warnings.filters)
    check(meddles, "exchange")
    said(raises(ValueError), "exchange")
    after = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist(), os.getcwd(), sys.stdout)
    assert before == after and filters == list(warnings.filters)
    assert COUNT == 0 and "LESSONS_MEDDLED" not in os.environ and torch.get_default_dtype() == torch.float32


def test_a_strange_kernel_does_not_change_the_verdict(capsys):
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    try:
        check(good, "exchange")
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    assert capsys.readouterr().out.startswith("Passed: exchange.")


# ---- answers that cheat ----------------------------------------------------------------------------------------------


def reads_the_partners_seed(mine, partner):
    frame = sys._getframe()
    while "inputs" not in frame.f_locals:
        frame = frame.f_back
    return torch.from_numpy(frame.f_locals["inputs"][partner][0].array())


def through_the_store(mine, partner):
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    store.set(f"of {rank}", mine.numpy().tobytes())
    return torch.frombuffer(bytearray(store.get(f"of {partner}")), dtype=mine.dtype).reshape(mine.shape)


def as_objects(mine, partner):
    everything = [None] * dist.get_world_size()
    dist.all_gather_object(everything, mine)
    return everything[partner]


def functional(mine, partner):
    from torch.distributed import _functional_collectives as collectives

    everything = collectives.all_gather_tensor(mine.unsqueeze(0).contiguous(), 0, dist.group.WORLD)
    return everything[partner].clone()


def tears_the_seeds_open(mine, partner):
    """Makes inside.Draw give zeros everywhere in this rank: the check draws its own."""
    from lessons_lib.checks import inside

    inside.Draw.array = lambda self: np.zeros(self.shape, dtype=self.dtype)
    return torch.zeros_like(mine)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (reads_the_partners_seed, "rank 0 sent no message; expected was 1 message to rank 1"),
        (through_the_store, "rank 0 sent no message; expected was 1 message to rank 1"),
        (as_objects, "Your code calls dist."),
        (functional, "Your code calls dist.all_gather"),
        (tears_the_seeds_open, "Rank 0"),
    ],
)
def test_a_cheat_is_seen(answer, words):
    assert words in said(answer)


# ---- what is handed to check() ---------------------------------------------------------------------------------------


def exchange(mine, partner):
    return good(mine, partner)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((None,), "needs your function itself, without calling it"),
        ((torch.zeros(3),), "needs your function itself, without calling it"),
        ((functools.partial(good),), "needs your function itself"),
        ((good,), "No exercise is called 'good'"),
        ((lambda mine, partner: mine,), "No exercise is called '<lambda>'"),
        ((good, "exchagne"), "Did you mean 'exchange'?"),
        ((good, ""), "No exercise is called ''"),
        ((good, 7), "needs your function itself"),
        ((torch.zeros(3), "exchange"), "check(exchange), not check(exchange(...))"),
        ((lambda mine: mine, "exchange"), "exchange is called as exchange(mine, partner), but yours takes (mine)"),
        ((lambda a, b, c: a, "exchange"), "yours takes (a, b, c)"),
        ((lambda *, mine, partner: mine, "exchange"), "yours takes (*, mine, partner)"),
        (("exchange",), "check() needs your function itself"),
    ],
)
def test_what_is_not_the_function_is_named(arguments, words):
    with pytest.raises(NotYet) as caught:
        check(*arguments)
    assert words in str(caught.value)


def test_every_way_to_name_it_works(capsys):
    class Answers:
        def exchange(self, mine, partner):
            return good(mine, partner)

    for arguments in ((exchange,), (Answers().exchange,), (functools.partial(good), "exchange"), (good, "01.exchange")):
        check(*arguments)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and len(set(lines)) == 1  # the same text every time, whatever the numbers were
