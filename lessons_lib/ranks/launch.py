"""Starting and ending the processes that become ranks.

Linux: the template (template.py) forks them, 0.1 s for four. Elsewhere, or with the environment variable
LESSONS_START=spawn: each is a fresh Python, which loads torch for itself (5-9 s when the disk is cold). Both kinds get
the same: orders through standard input, everything they say through standard output; no port, no fixed name.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

_CHUNK = 65536
_BURST = 1 << 20  # bytes read from one rank in one go, so that one that prints without end does not hold up the rest


@dataclass
class Process:
    """A rank's process as the launcher sees it. `status`: None while it runs, then as subprocess has it (-9: signal 9)."""

    rank: int
    orders: int  # file descriptor: lines of JSON to the rank
    output: int  # file descriptor: what the rank says
    pid: int | None = None
    status: int | None = None
    popen: subprocess.Popen | None = None

    def order(self, **content) -> None:
        with contextlib.suppress(OSError):  # it has ended: its status tells
            os.write(self.orders, json.dumps(content).encode() + b"\n")

    def read(self) -> tuple[bytes, bool]:
        """What the rank said since, and whether that is all there is now. Does not wait."""
        parts, size = [], 0
        while size < _BURST:
            piece = _read_now(self.output)
            if not piece:
                return b"".join(parts), True
            parts.append(piece)
            size += len(piece)
        return b"".join(parts), False

    def close(self) -> None:
        for fd in (self.orders, self.output):
            with contextlib.suppress(OSError):
                os.close(fd)


def environment() -> dict[str, str]:
    """What the environment of a rank has beside the launcher's own: one thread, the loopback interface, a quiet torch."""
    loopback = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
    extra = {"GLOO_SOCKET_IFNAME": loopback} if loopback else {}
    one = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    return {**one, **extra, "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONHASHSEED": "0", "CUDA_VISIBLE_DEVICES": ""}


def forks() -> bool:
    return sys.platform == "linux" and os.environ.get("LESSONS_START", "fork") != "spawn"


# ---- Linux: ranks forked from the template ---------------------------------------------------------------------------


class _TemplateProcess:
    """The running template; one for a launcher process. A launcher that was itself forked starts its own."""

    def __init__(self):
        self.lock, self.owner, self.popen, self.connection, self.life = threading.Lock(), None, None, None, None
        self.words = None  # a file: what it writes, which is what went wrong

    def start(self) -> None:
        with self.lock:
            if self.owner == os.getpid() and self.popen.poll() is None:
                return
            self.connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            their_life, self.life = os.pipe()
            call = f"from lessons_lib.ranks.template import main; main({theirs.fileno()}, {their_life})"
            self.words = tempfile.TemporaryFile()
            with theirs:
                how = {"stdin": subprocess.DEVNULL, "stdout": self.words, "stderr": self.words}
                self.popen = _python(call, pass_fds=(theirs.fileno(), their_life), **how)
            os.close(their_life)
            self.owner = os.getpid()

    def open_run(self, folder: str) -> socket.socket:
        """A connection for one run. The template may still be loading: requests wait in the socket."""
        for attempt in (0, 1):
            self.start()
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                try:
                    with self.lock:
                        socket.send_fds(self.connection, [json.dumps({"folder": folder}).encode()], [theirs.fileno()])
                    return ours
                except OSError:
                    ours.close()
                    if attempt:
                        raise
                    self.popen.wait(timeout=5)  # it died: start another
        raise AssertionError("unreachable")

    def last_words(self) -> str:
        """Why it ended: its status, and the end of what it wrote."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(timeout=2)
        self.words.seek(0)
        text = self.words.read().decode(errors="replace").strip()
        return f"status {self.popen.returncode}" + (f"\n{text[-2000:]}" if text else "")

    def stop(self) -> None:
        if self.owner == os.getpid() and self.popen is not None:
            os.close(self.life)
            self.connection.close()
            self.owner = None
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(timeout=2)


_template = _TemplateProcess()
if sys.platform == "linux":
    atexit.register(_template.stop)


def prepare() -> None:
    """Start the template, so that the first run finds it ready. Returns at once; does nothing where ranks are not forked."""
    if forks():
        _template.start()


class ForkedRanks:
    """The ranks of one run, on Linux."""

    def __init__(self, folder: str, token: bytes):
        self.token, self.processes, self.broken = token, {}, ""
        self.socket = _template.open_run(folder)
        self.socket.setblocking(False)

    def start(self, rank: int) -> Process:
        their_orders, orders = os.pipe()
        output, their_output = os.pipe()
        os.set_blocking(output, False)
        request = json.dumps({"do": "start", "rank": rank, "token": self.token.hex()}).encode()
        try:
            self.socket.setblocking(True)
            socket.send_fds(self.socket, [request], [their_orders, their_output])
        finally:
            self.socket.setblocking(False)
            os.close(their_orders)
            os.close(their_output)
        self.processes[rank] = Process(rank, orders, output)
        return self.processes[rank]

    def poll(self) -> None:
        """Bring `status` of every process up to date."""
        while True:
            try:
                message = self.socket.recv(65536)
            except BlockingIOError:
                return
            except OSError:
                message = b""
            if not message:  # the template has ended, and its ranks with it
                self.broken = _template.last_words()
                for process in self.processes.values():
                    process.status = -signal.SIGKILL if process.status is None else process.status
                return
            news = json.loads(message)
            process = self.processes[news["rank"]]
            process.pid = news.get("process", process.pid)
            process.status = news.get("status", process.status)

    def filenos(self) -> list[int]:
        return [self.socket.fileno()]

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.send(json.dumps({"do": "kill"}).encode())

    def close(self) -> None:
        self.socket.close()


# ---- macOS, Windows: ranks are fresh processes -----------------------------------------------------------------------


class SpawnedRanks:
    """The ranks of one run, where processes are not forked."""

    def __init__(self, folder: str, token: bytes):
        self.token, self.processes, self.broken = token, {}, ""

    def start(self, rank: int) -> Process:
        output, their_output = os.pipe()
        call = f"from lessons_lib.ranks.child import main; main(bytes.fromhex({self.token.hex()!r}))"
        try:
            popen = _python(call, stdin=subprocess.PIPE, stdout=their_output, stderr=their_output)
        finally:
            os.close(their_output)
        orders = os.dup(popen.stdin.fileno())
        popen.stdin.close()
        if os.name == "posix":
            os.set_blocking(output, False)
        self.processes[rank] = Process(rank, orders, output, popen.pid, popen=popen)
        return self.processes[rank]

    def poll(self) -> None:
        for process in self.processes.values():
            process.status = process.popen.poll()

    def filenos(self) -> list[int]:
        return []

    def kill(self) -> None:
        for process in self.processes.values():
            try:
                os.killpg(process.pid, signal.SIGKILL)  # with what it started
            except (AttributeError, OSError):  # Windows; or it has not made its group yet, or has ended
                process.popen.kill()

    def close(self) -> None:
        return


def group(folder: str, token: bytes) -> ForkedRanks | SpawnedRanks:
    return ForkedRanks(folder, token) if forks() else SpawnedRanks(folder, token)


def stop(ranks: ForkedRanks | SpawnedRanks, patience: float = 2.0) -> None:
    """Kill every rank that still runs and see it gone. What they said can still be read."""
    ranks.poll()
    ranks.kill()
    limit = time.monotonic() + patience
    while time.monotonic() < limit and any(p.status is None and p.pid is not None for p in ranks.processes.values()):
        time.sleep(0.002)
        ranks.poll()


def give_back(ranks: ForkedRanks | SpawnedRanks) -> None:
    """Close all that was open. The template then ends what `stop` was not patient enough for."""
    ranks.close()
    for process in ranks.processes.values():
        process.close()


def _python(call: str, **how) -> subprocess.Popen:
    """A fresh Python that finds modules as this one does, and is not touched by the kernel's interrupts."""
    path = json.dumps([os.path.abspath(entry) for entry in [*sys.path, _home()]])
    code = f"import sys, json; sys.path[:] = json.loads(sys.argv.pop()); {call}"
    env = {**os.environ, **environment()}
    flags = getattr(subprocess, "CREATE_NO_WINDOW", 0)
    with _interrupts_blocked():
        return subprocess.Popen([sys.executable, "-c", code, path], env=env, creationflags=flags, **how)


def _home() -> str:
    return str(Path(__file__).resolve().parents[2])


@contextlib.contextmanager
def _interrupts_blocked():
    """What is started here begins with SIGINT blocked: Jupyter interrupts the kernel's whole process group."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _read_now(fd: int) -> bytes:
    if os.name == "posix":
        try:
            return os.read(fd, _CHUNK)
        except (BlockingIOError, OSError):
            return b""
    import _winapi
    import msvcrt  # Windows: pipes cannot be made non-blocking, but one can look

    try:
        size = _winapi.PeekNamedPipe(msvcrt.get_osfhandle(fd), 0)[0]
        return os.read(fd, min(size, _CHUNK)) if size else b""
    except OSError:
        return b""
