"""A table that shows itself in a notebook and in a terminal. Ground floor: imports nothing of ours."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np


class Table(list):
    """A list of rows (tuples) under `columns`, shown as a table in a notebook and in a terminal."""

    def __init__(self, columns: Sequence[str], rows: Sequence[tuple]):
        super().__init__(rows)
        self.columns = tuple(columns)

    def __repr__(self) -> str:
        cells = [self.columns, *[tuple(_cell(v) for v in row) for row in self]]
        widths = [max(len(row[i]) for row in cells) for i in range(len(self.columns))]
        numeric = [all(not isinstance(row[i], str) for row in self) for i in range(len(self.columns))]
        line = ["  ".join(c.rjust(w) if n else c.ljust(w) for c, w, n in zip(row, widths, numeric)).rstrip() for row in cells]
        return "\n".join([line[0], "-" * len(line[0]), *line[1:]])

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{escape(c)}</th>" for c in self.columns)
        cell = '<td style="white-space:nowrap">'  # "24.8 ms" stays on one line; the Lab scrolls what is too wide
        body = "".join("<tr>" + "".join(f"{cell}{escape(_cell(v))}</td>" for v in row) + "</tr>" for row in self)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value: Any) -> str:
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        return f"{int(value):,}"
    return f"{value:.4g}" if isinstance(value, (float, np.floating)) else str(value)
