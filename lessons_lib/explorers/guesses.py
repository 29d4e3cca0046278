"""The prediction widget: takes the reader's guess and keeps it, never waits for it, and later shows it beside the result.

A prediction is kept under its key for as long as the kernel runs, so running the cell again does not lose it.
"""

from __future__ import annotations

import math
import sys
from html import escape
from numbers import Real

import ipywidgets as widgets

from ..plots.wording import three_digits
from ..stored import hiding_rule, key_of, paragraph, show

_KEPT: dict[str, object] = {}  # key -> prediction
# Units that convert into each other, each with its size.
_FAMILIES = (
    {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9},
    {"bytes": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12},
    {"MB/s": 1e6, "GB/s": 1e9, "TB/s": 1e12},
)


def guess(question: str, choices=None, unit: str | None = None, answer=None, key: str | None = None) -> Guess:
    """Ask for a prediction: one of `choices`, or a number in `unit`.

    `choices` is a list of texts, or a dict from each text to what is believed by those who choose it (shown by `reveal`).
    `answer`, if known beforehand, is what `reveal()` compares with. `key` tells predictions apart; without it the question does.
    """
    if not isinstance(question, str) or not question.strip():
        raise ValueError(
            f"question is {question!r}; allowed is a text with at least one word: write what the reader is to predict."
        )
    if (choices is None) == (unit is None):
        raise ValueError(
            'Give either choices=["less", "more"] or unit="ms": a prediction is one of some texts, or a number with a unit.'
        )
    if key is not None and not isinstance(key, str):
        raise TypeError(f"key is {key!r}; allowed is a text, or nothing: the question is then the key.")
    if unit is not None and (not isinstance(unit, str) or not unit.strip()):
        raise ValueError(f'unit is {unit!r}; allowed is a text such as "ms", "GB" or "messages".')
    if choices is not None:
        choices = _checked_choices(choices)
    made = Guess(question.strip(), choices, unit and unit.strip(), key or question.strip())
    if answer is not None:
        made.answer = made.checked(answer, "answer")
    return made


def _checked_choices(choices) -> dict[str, str]:
    try:
        out = dict(choices) if isinstance(choices, dict) else dict.fromkeys(list(choices), "")
        bad = isinstance(choices, str) or any(not isinstance(c, str) or not c.strip() for c in out) or len(out) < len(list(choices))
    except TypeError:
        out, bad = {}, True
    if bad or len(out) < 2:
        raise ValueError(
            f"choices is {choices!r}; allowed are two or more different texts, or a dict from each text to the belief behind it."
        )
    return {choice: str(belief) for choice, belief in out.items()}


def parse(text: str, unit: str) -> float | None:
    """The number that a reader typed, in `unit`; None for an empty text. ValueError says what to type instead."""
    line = " ".join(text.split())
    if not line:
        return None
    number, typed = line, unit
    while number and not (number[-1].isdigit() or number[-1] == "."):
        number = number[:-1]
    if number:
        typed = line[len(number) :].strip() or unit
    sizes = next((f for f in _FAMILIES if unit in f), {unit: 1.0})
    typed = next((u for u in (unit, *sizes) if u.lower() == typed.lower().replace("\u00b5", "u")), None)
    try:
        value = float(number if "," not in number else _without_commas(number))
    except ValueError:
        value = math.nan
    if typed is None and math.isfinite(value):
        known = f" (or in {', '.join(sizes)})" if len(sizes) > 1 else ""
        raise ValueError(f"\u201c{line}\u201d has a unit that is not known here: type a number of {unit}{known}.")
    if typed is None or not math.isfinite(value) or value < 0:
        raise ValueError(f"\u201c{line}\u201d is not a number of 0 or more: type one such as 12.5 ({unit}).")
    value = value * sizes[typed] / sizes[unit]
    if not math.isfinite(value):
        raise ValueError(f"\u201c{line}\u201d is too large: type a number of {unit}.")
    return value


def _without_commas(number: str) -> str:
    """ "1,200" is 1200; "12,5" could mean two things and is refused."""
    head, *groups = number.partition(".")[0].split(",")
    if not 1 <= len(head) <= 3 or any(len(g) != 3 for g in groups):
        raise ValueError
    return number.replace(",", "")


class Guess(widgets.VBox):
    """What `guess` returns. `prediction` is the reader's choice (a text) or number (in `unit`), None until there is one."""

    def __init__(self, question: str, choices: dict[str, str] | None, unit: str | None, key: str):
        self.question, self.choices, self.unit, self.key = question, choices, unit, key
        self.answer = None
        self._stored_key = key_of(question, *(choices or ()), unit or "")
        heading = widgets.HTML(hiding_rule(self._stored_key) + paragraph(f"Predict: {question}", "font-weight:600;line-height:1.4"))
        kept = self.prediction
        if choices is not None:
            self.entry = widgets.RadioButtons(
                options=list(choices), value=kept, layout={"width": "max-content", "max_width": "100%"}
            )
            row = self.entry
        else:
            shown = "" if kept is None else f"{kept:.12g}"
            self.entry = widgets.Text(value=shown, placeholder="a number", layout={"width": "140px"})
            row = widgets.HBox([widgets.Label("Your prediction"), self.entry, widgets.Label(unit)])
        self.note = widgets.HTML(self._note())
        super().__init__([heading, row, self.note], layout={"max_width": "760px"})
        self.entry.observe(self._entered, "value")

    @property
    def prediction(self):
        """What the reader predicted last, None if nothing (fitting) yet."""
        kept = _KEPT.get(self.key)
        fits = kept in self.choices if self.choices is not None else isinstance(kept, float)
        return kept if fits else None

    def _entered(self, change) -> None:
        problem = ""
        try:
            value = change["new"] if self.choices is not None else parse(change["new"], self.unit)
            if value is None:
                _KEPT.pop(self.key, None)
            else:
                _KEPT[self.key] = value
        except ValueError as error:
            problem = str(error)
            _KEPT.pop(self.key, None)
        self.note.value = self._note(problem)

    def _note(self, problem: str = "") -> str:
        kept = self.prediction
        text = "No prediction yet. You may also run on without one." if kept is None else f"Kept: {self.worded(kept)}."
        return f'<div role="status">{paragraph(problem or text, "line-height:1.4;min-height:1.4em")}</div>'

    def worded(self, value) -> str:
        return value if self.choices is not None else f"{three_digits(value)} {self.unit}"

    def checked(self, value, what: str):
        """A result or answer in the form of a prediction; TypeError or ValueError says what is allowed."""
        if self.choices is not None:
            if not isinstance(value, str) or value not in self.choices:
                raise ValueError(f"{what} is {value!r}; allowed is one of the choices: {', '.join(map(repr, self.choices))}.")
            return value
        if hasattr(value, "step_time"):
            sizes = _FAMILIES[0]
            if self.unit not in sizes:
                raise ValueError(f"{what} is a timeline, but the prediction is in {self.unit}: give a number of {self.unit}.")
            return value.step_time / sizes[self.unit]
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(f"{what} is {value!r}; allowed is a number of {self.unit}, or a timeline whose step time is meant.")
        if not 0 <= value <= sys.float_info.max:
            raise ValueError(f"{what} is {value!r}; allowed is a finite number of {self.unit}, 0 or more.")
        return float(value)

    def reveal(self, result=None, kind: str = "") -> Reveal:
        """The prediction beside `result` (a choice, a number in the unit, a timeline), or beside the answer given before.

        `kind` says what sort of number the result is ("measured", "replayed", "predicted"); a timeline knows its own.
        """
        if result is None and self.answer is None:
            raise ValueError("There is nothing to reveal: call reveal(result), or give answer=... to guess.")
        value = self.answer if result is None else self.checked(result, "result")
        kind = kind or getattr(result, "kind", "")
        lines = [f"Result{f' ({kind})' if kind else ''}: {self.worded(value)}."]
        kept = self.prediction
        if kept is None:
            lines.insert(0, "You made no prediction.")
        elif self.choices is not None:
            lines.insert(0, f"You predicted: {kept}.")
            lines.append("That is right." if kept == value else f"Not so: {self.choices[kept] or 'compare the two.'}")
        else:
            lines.insert(0, f"You predicted: {self.worded(kept)}.")
            lines.append(_compared(kept, value))
        if self.choices is not None and self.choices[value]:
            lines.append(self.choices[value])
        return Reveal(self.question, lines)

    def _ipython_display_(self, **options) -> None:
        items = "".join(f"<li>{escape(choice)}</li>" for choice in self.choices or ())
        asked = f"<ul>{items}</ul>" if items else paragraph(f"(a number of {self.unit})")
        show(self, paragraph(f"Predict: {self.question}", "font-weight:600") + asked, self._text(), self._stored_key)

    def _text(self) -> str:
        rows = [f"  ( ) {choice}" for choice in self.choices] if self.choices is not None else [f"  ____ {self.unit}"]
        return "\n".join([f"Predict: {self.question}", *rows])

    def __repr__(self) -> str:
        return "Prediction widget; it takes your answer where a kernel runs"


def _compared(predicted: float, value: float) -> str:
    if predicted == value:
        return "That is exactly right."
    if min(predicted, value) == 0:
        return "One of the two is zero."
    factor = max(predicted, value) / min(predicted, value)
    if factor <= 1.1:
        return "That is right to within 10%."
    return f"Your prediction is {three_digits(factor)} times too {'high' if predicted > value else 'low'}."


class Reveal:
    """Prediction and result side by side: shows itself in a notebook, prints as text."""

    def __init__(self, question: str, lines: list[str]):
        self.question, self.lines = question, lines

    def _repr_html_(self) -> str:
        body = "".join(paragraph(line) for line in self.lines)
        return (
            f'<div style="border-left:4px solid #0072B2;padding:2px 10px">{paragraph(self.question, "font-weight:600")}{body}</div>'
        )

    def __repr__(self) -> str:
        return "\n".join([self.question, *self.lines])
