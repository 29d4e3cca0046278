"""From what a rank prints to whole lines in the cell, in an order that is the same every time.

One pipe leads from each rank to the launcher. Python's own prints travel in small frames, which carry how many
operations the rank had noted when it printed; everything between frames was written by C code or by a program that the
rank started. Messages from the rank to the launcher use the same frames, so nothing overtakes what was printed before.
"""

from __future__ import annotations

import heapq
import io
import json
import os
import struct
import sys
import threading
from collections.abc import Callable

OUT, ERR, MESSAGE, OTHER = range(4)  # print(), sys.stderr, a message to the launcher, anything not in a frame
_HEADER = struct.Struct("<BqH")  # stream, position, number of bytes
_PAYLOAD = 400  # with token and header below 512 bytes, what every system writes to a pipe in one piece

LINES_KEPT = 5000  # of each rank; what is beyond is counted and left out
BYTES_KEPT = 1_000_000  # of each rank, all lines together
LINE_LENGTH = 10_000  # characters kept of one line


# ---- in a rank -------------------------------------------------------------------------------------------------


class Channel:
    """A rank's end of the pipe: `send` writes frames, one thread at a time."""

    def __init__(self, fd: int, token: bytes):
        self.fd, self.token, self.lock = fd, token, threading.Lock()
        self.position: Callable[[], int] = lambda: 0
        if hasattr(os, "register_at_fork"):  # a process that the rank forks must not inherit a lock that is held
            os.register_at_fork(after_in_child=self._fresh_lock)

    def _fresh_lock(self) -> None:
        self.lock = threading.Lock()

    def send(self, stream: int, data: bytes) -> None:
        position = self.position()
        with self.lock:
            for at in range(0, len(data), _PAYLOAD):
                piece = data[at : at + _PAYLOAD]
                frame = self.token + _HEADER.pack(stream, position, len(piece)) + piece
                while frame:
                    frame = frame[os.write(self.fd, frame) :]

    def message(self, **content) -> None:
        """Tell the launcher something: JSON on one line."""
        self.send(MESSAGE, json.dumps(content).encode() + b"\n")

    def text_stream(self, stream: int) -> io.TextIOWrapper:
        """What becomes sys.stdout (OUT) or sys.stderr (ERR): sends whenever a line ends or `flush` is called."""
        raw = _Frames(self, stream)
        return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", newline="\n", line_buffering=True)


class _Frames(io.RawIOBase):
    def __init__(self, channel: Channel, stream: int):
        self.channel, self.stream = channel, stream

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 1 if self.stream == OUT else 2

    def write(self, data) -> int:
        data = bytes(data)
        self.channel.send(self.stream, data)
        return len(data)


# ---- in the launcher: bytes to lines -------------------------------------------------------------------------------


class Assembler:
    """Takes one rank's bytes as they come; gives (stream, position, line) for every line that is complete."""

    def __init__(self, token: bytes):
        self.token, self.pending, self.position = token, b"", 0
        self.partial = [_Line(bounded=stream != MESSAGE) for stream in range(4)]

    def feed(self, data: bytes, final: bool = False) -> list[tuple[int, int, str]]:
        """`final`: nothing follows, so what is left counts as a line although no newline ended it."""
        found: list[tuple[int, int, str]] = []
        buffer, at = self.pending + data, 0
        head = len(self.token) + _HEADER.size
        while True:
            start = buffer.find(self.token, at)
            if start < 0:
                keep = len(buffer) - (0 if final else self._half_token(buffer[at:]))
                self._add(OTHER, buffer[at:keep], found)
                at = keep
                break
            self._add(OTHER, buffer[at:start], found)
            at = start
            if len(buffer) < start + head:
                break
            stream, position, size = _HEADER.unpack_from(buffer, start + len(self.token))
            if len(buffer) < start + head + size:
                break
            at = start + head + size
            self.position = max(self.position, position)
            self._add(stream if stream < OTHER else OTHER, buffer[start + head : at], found)
        self.pending = b"" if final else buffer[at:]
        if final:
            for stream in (OTHER, ERR, OUT):
                if self.partial[stream].kept:
                    found.append((stream, self.position, self.partial[stream].end()))
        return found

    def _half_token(self, tail: bytes) -> int:
        """How many bytes at the end may be the beginning of a token."""
        sizes = range(min(len(self.token) - 1, len(tail)), 0, -1)
        return next((size for size in sizes if tail.endswith(self.token[:size])), 0)

    def _add(self, stream: int, data: bytes, found: list) -> None:
        if not data:
            return
        *complete, rest = data.split(b"\n")
        line = self.partial[stream]
        for piece in complete:
            line.add(piece)
            found.append((stream, self.position, line.end()))
        line.add(rest)


class _Line:
    """A line in the making; of a very long one only the beginning is kept."""

    def __init__(self, bounded: bool):
        self.kept, self.left_out, self.bounded = b"", 0, bounded

    def add(self, piece: bytes) -> None:
        self.kept += piece
        if self.bounded and len(self.kept) > 4 * LINE_LENGTH:  # a character has at most 4 bytes
            self.kept = _after_return(self.kept)
            self.left_out += max(0, len(self.kept) - 4 * LINE_LENGTH)
            self.kept = self.kept[: 4 * LINE_LENGTH]

    def end(self) -> str:
        text = _after_return(self.kept).decode("utf-8", errors="replace").rstrip("\r")
        left_out = self.left_out + max(0, len(text) - LINE_LENGTH) if self.bounded else 0
        self.kept, self.left_out = b"", 0
        return f"{text[:LINE_LENGTH]} ... (about {left_out:,} more characters)" if left_out else text


def _after_return(line: bytes) -> bytes:
    """What a terminal would show of a line that was overwritten with carriage returns, as progress bars do."""
    if b"\r" not in line:
        return line
    parts = [part for part in line.split(b"\r") if part]
    ending = b"\r" if line.endswith(b"\r") else b""
    return parts[-1] + ending if parts else b""


class Allowance:
    """Counts what one rank printed, and says whether a line is still within what is kept."""

    def __init__(self):
        self.lines = self.nbytes = self.left_out = 0

    def admits(self, line: str) -> bool:
        if self.left_out or self.lines >= LINES_KEPT or self.nbytes + len(line) > BYTES_KEPT:
            self.left_out += 1
            return False
        self.lines += 1
        self.nbytes += len(line)
        return True

    def notice(self) -> str:
        """What to say about the lines that were left out; starts to count anew."""
        count, self.left_out = self.left_out, 0
        return f"... {count:,} more lines left out (kept of each rank: {LINES_KEPT:,} lines, {BYTES_KEPT:,} characters)"


# ---- in the launcher: lines in order -------------------------------------------------------------------------------


class Order:
    """Puts the lines of all ranks in an order that does not depend on how fast each rank was.

    A line's key is (logical time, how many lines its rank had printed at that logical time, rank). So a line printed
    before a message was sent comes before what its receiver prints after it, and ranks that do the same alternate. A
    line is released when no rank that still runs can print one with a smaller key.
    """

    def __init__(self, world_size: int):
        self.waiting: list[tuple[int, int, int, float, str]] = []  # a heap: clock, number, rank, arrival, line
        self.last = [(-1, 0)] * world_size  # of each rank: clock of its last line, lines printed at that clock
        self.everything: list[tuple[int, int, int, str]] = []

    def add(self, rank: int, clock: int, line: str, arrival: float) -> None:
        clock, number = self._next(rank, clock)
        self.last[rank] = (clock, number + 1)
        heapq.heappush(self.waiting, (clock, number, rank, arrival, line))
        self.everything.append((clock, number, rank, line))

    def _next(self, rank: int, clock: int) -> tuple[int, int]:
        last, count = self.last[rank]
        return (clock, 0) if clock > last else (last, count)

    def release(self, bounds: dict[int, int], held_since: float) -> list[tuple[int, str]]:
        """Lines (rank, text) that may be shown now.

        `bounds`: for each rank that may still print, the least logical time of its next line. Lines that arrived
        before `held_since`, and those that belong before them, are released in any case.
        """
        floor = min(((*self._next(rank, clock), rank) for rank, clock in bounds.items()), default=None)
        late = max((key[:3] for key in self.waiting if key[3] < held_since), default=(-1, 0, 0))
        released = []
        while self.waiting and (floor is None or self.waiting[0][:3] < floor or self.waiting[0][:3] <= late):
            _, _, rank, _, line = heapq.heappop(self.waiting)
            released.append((rank, line))
        return released

    def output(self) -> list[tuple[int, str]]:
        """All lines so far, in order: (rank, line)."""
        return [(rank, line) for _, _, rank, line in sorted(self.everything)]


def hold_seconds() -> float:
    """How long a printed line waits for lines that belong before it: LESSONS_HOLD_SECONDS, 1 by default."""
    try:
        return max(0.0, float(os.environ.get("LESSONS_HOLD_SECONDS", "1")))
    except ValueError:
        return 1.0


def show(lines: list[tuple[int, str]]) -> None:
    """One write for all of them: in a notebook they become one stream output."""
    if lines:
        sys.stdout.write("".join(f"[rank {rank}] {line}\n" for rank, line in lines))
        sys.stdout.flush()
