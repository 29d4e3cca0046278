"""The text that the lessons train on: whole sonnets, tokens there and back, the same batch on every rank."""

import pytest

torch = pytest.importorskip("torch")
from lessons_lib import run, shapes  # noqa: E402
from lessons_lib.models import Transformer  # noqa: E402
from lessons_lib.models.text import SONNETS, batch_of_text, to_text, to_tokens  # noqa: E402


def test_sonnets_have_fourteen_lines_of_plain_characters():
    poems = SONNETS.strip().split("\n\n")
    assert len(poems) == 8 and {len(poem.splitlines()) for poem in poems} == {14}
    assert SONNETS.isascii() and SONNETS.isprintable() is False and 4000 < len(SONNETS) < 8000
    for line in SONNETS.splitlines():
        assert line == line.strip() and len(line) < 60
    assert poems[1].startswith("Shall I compare thee to a summer's day?")
    assert poems[1].endswith("So long lives this, and this gives life to thee.")


def test_tokens_there_and_back():
    tokens = to_tokens(SONNETS)
    assert to_text(tokens) == SONNETS and tokens.dtype == torch.int64
    assert 0 <= int(tokens.min()) and int(tokens.max()) < shapes.TINY.vocabulary
    assert to_tokens("Az\n").tolist() == [65, 122, 10]


def test_a_batch_is_pieces_of_the_text_and_the_same_on_every_rank():
    def program():
        return batch_of_text(3, 5), batch_of_text(4, 5)

    first, other = batch_of_text(3, 5), batch_of_text(4, 5)
    assert first.shape == (5, 33) and not torch.equal(first, other)
    assert all(to_text(row) in SONNETS for row in first)
    for found in run(program, ranks=2).results:
        assert torch.equal(found[0], first) and torch.equal(found[1], other)
    assert batch_of_text(0, 0).shape == (0, 33) and batch_of_text(0, 2, length=1).shape == (2, 2)
    whole = len(SONNETS) - 1
    assert to_text(batch_of_text(0, 1, length=whole)[0]) == SONNETS
    assert Transformer(shapes.TINY)(first[:, :-1]).shape == (5, 32, 128)


@pytest.mark.parametrize("bad", [-1, True, 1.5, float("nan"), float("inf"), None, "3", 10**9])
def test_numbers_that_are_none_are_refused(bad):
    for name, call in (
        ("step", lambda: batch_of_text(-1 if bad == 10**9 else bad, 2)),
        ("samples", lambda: batch_of_text(0, bad)),
        ("length", lambda: batch_of_text(0, 2, bad)),
    ):
        with pytest.raises(ValueError, match=f"{name} is .*, but must be a whole number from"):
            call()
    with pytest.raises(ValueError, match="length is 0"):
        batch_of_text(0, 2, 0)


def test_text_and_tokens_that_are_none_are_refused():
    for bad in ("", "naïve", 3, None, b"bytes"):
        with pytest.raises(ValueError, match="must be one character or more, all of them ASCII"):
            to_tokens(bad)
    for bad in (None, [65], torch.zeros(2, 2, dtype=torch.int64), torch.zeros(3), torch.zeros(3, dtype=torch.complex64)):
        with pytest.raises(TypeError, match="tokens must be a row of whole numbers"):
            to_text(bad)
    for bad in ([-1], [128, 65]):
        with pytest.raises(ValueError, match="ASCII codes are 0 to 127"):
            to_text(torch.tensor(bad))
    assert to_text(torch.tensor([], dtype=torch.int64)) == ""
