"""Notes that ranks take before they act, readable by the launcher while they run and after they were killed.

Each rank appends to one file of its own: no lock, no port, and what was written survives a kill -9. A note is a JSON
list on a line of its own; its first item says what it is:

* ["post", index, operation]   an operation is about to be issued (see `Operation`), as number `index` of this rank
* ["wait", index]              the rank is about to wait for operation `index`
* ["done", index, source]      that wait ended; `source` is the sender's rank where the receive did not name one
* ["left", index]              that wait raised an error instead
* ["drop", index, name, line]  the handle of operation `index`, an `name` started at `line`, was thrown away unwaited
* ["group", ranks, line]       the rank called new_group; ["made"] when that returned
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Operation:
    """One posted operation as the launcher compares it between ranks.

    `group` are the members' global ranks; `name` tells groups with the same members apart. `shape` and `dtype` are those
    of the tensor handed over; `numel` counts the elements that must agree between the two sides. `peer` is the other
    side of a message (-1: any) and the root of a collective. `splits` are the pieces of an all_to_all (sent, received).
    `where` is the line of the program, `direct` whether the program itself called the operation (not a library inside it).
    """

    op: str  # "send", "recv", or the collective's name
    name: str
    group: tuple[int, ...]
    peer: int
    tag: int
    shape: tuple[int, ...]
    dtype: str
    numel: int
    reduce: str
    where: str
    direct: bool
    splits: tuple = ()

    def __str__(self) -> str:
        what = f"{'x'.join(map(str, self.shape)) or '1'} {self.dtype}" if self.dtype else "nothing"
        if self.op == "send":
            return f"send of {what} to rank {self.peer}"
        if self.op == "recv":
            return f"recv of {what} from {'any rank' if self.peer < 0 else f'rank {self.peer}'}"
        return "barrier" if self.op == "barrier" else f"{self.op} of {what}"


FIELDS = tuple(Operation.__dataclass_fields__)


def path_of(folder: str | Path, rank: int) -> Path:
    return Path(folder) / f"notes.{rank}"


class NoteWriter:
    """The rank's side. `position` counts the notes written so far."""

    def __init__(self, folder: str | Path, rank: int):
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)
        self._file = os.open(path_of(folder, rank), flags, 0o600)
        self.position = 0

    def write(self, *note) -> None:
        os.write(self._file, json.dumps(note, separators=(",", ":")).encode() + b"\n")
        self.position += 1

    def post(self, index: int, operation: Operation) -> None:
        self.write("post", index, [getattr(operation, name) for name in FIELDS])

    def close(self) -> None:
        os.close(self._file)


class NoteReader:
    """The launcher's side: `read()` returns the notes that came since the last call."""

    def __init__(self, folder: str | Path, rank: int):
        self._path, self._file, self._rest = path_of(folder, rank), None, b""

    def read(self) -> list[list]:
        if self._file is None:
            try:
                self._file = open(self._path, "rb", buffering=0)
            except FileNotFoundError:
                return []
        data = self._file.read()
        if not data:
            return []
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def operation(fields: list) -> Operation:
    """The Operation that a "post" note carries."""
    values = dict(zip(FIELDS, fields))
    for name in ("group", "shape", "splits"):
        values[name] = tuple(map(tuple, values[name])) if name == "splits" else tuple(values[name])
    return Operation(**values)
