"""The template (Linux): a process that has torch ready, and makes a rank by forking itself, in milliseconds.

It is started once per kernel. For every run the launcher sends it one end of a socket; on that socket come requests for
ranks, each with the two ends of pipes that the rank will use, and back go process numbers and exit statuses. When that
socket closes, all ranks of that run are killed; when the launcher's own connection closes, the template ends too.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import json
import os
import select
import selectors
import shutil
import signal
import socket
import sys
import traceback
from dataclasses import dataclass, field

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_EXTRAS = (  # what lessons import sooner or later, loaded when there is nothing else to do
    "torch.distributed.tensor.parallel",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
)


@dataclass
class _Run:
    socket: socket.socket
    folder: str
    ranks: dict[int, int] = field(default_factory=dict)  # process -> rank


def main(fd: int, life: int) -> None:
    """`fd`: the launcher's connection, a socket of kind SOCK_SEQPACKET. `life`: a pipe that closes when the launcher ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    _end_with_launcher(life)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # what a rank leaves behind becomes our child, and we end it
    connection = socket.socket(fileno=fd)
    connection.set_inheritable(False)
    warm_up()
    os.close(life)  # from here on the connection tells
    Template(connection).serve()


def _end_with_launcher(life: int) -> None:
    """End at once if the launcher ends, even in the middle of loading torch: the kernel sends SIGIO, whose default is to end."""
    fcntl.fcntl(life, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(life, fcntl.F_SETFL, fcntl.fcntl(life, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([life], [], [], 0)[0]:
        os._exit(0)


def warm_up() -> None:
    """Everything that a rank would otherwise do for itself: imports, and the first use of autograd and optimisers."""
    import numpy  # noqa: F401
    import torch
    import torch.distributed

    from .. import recorder  # noqa: F401
    from . import child  # noqa: F401

    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    for optimizer in (torch.optim.SGD(model.parameters(), 0.1), torch.optim.AdamW(model.parameters())):
        torch.nn.functional.mse_loss(model(torch.ones(2, 4)), torch.zeros(2, 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    del model, optimizer
    _freeze()


def _freeze() -> None:
    gc.collect()
    gc.freeze()  # a later collection in a rank would otherwise touch, and so copy, all of this memory


class Template:
    def __init__(self, connection: socket.socket):
        self.connection, self.parent = connection, os.getppid()
        self.runs: dict[int, _Run] = {}
        self.selector = selectors.DefaultSelector()
        self.wake, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.wake_write = wake
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self.selector.register(connection, selectors.EVENT_READ)
        self.selector.register(self.wake, selectors.EVENT_READ)
        self.extras = list(_EXTRAS)

    def serve(self) -> None:
        while True:
            idle = bool(self.extras) and not self.runs
            ready = self.selector.select(0.3 if idle else 1.0)
            for key, _ in ready:
                if key.fd == self.wake:
                    self._drain()
                elif key.fd == self.connection.fileno():
                    self._new_run()
                elif key.fd in self.runs:
                    self._request(self.runs[key.fd])
            self._reap()
            if not ready and os.getppid() != self.parent:
                self._end()
            if not ready and idle:
                self._load_extra()

    def _drain(self) -> None:
        try:
            while os.read(self.wake, 4096):
                pass
        except BlockingIOError:
            pass

    def _load_extra(self) -> None:
        try:
            __import__(self.extras.pop(0))
        except Exception:  # a release of torch without it
            return
        if not self.extras:
            _freeze()

    def _new_run(self) -> None:
        message, fds, _, _ = socket.recv_fds(self.connection, 65536, 1)
        if not fds:
            self._end()
        run = _Run(socket.socket(fileno=fds[0]), json.loads(message)["folder"])
        self.runs[fds[0]] = run
        self.selector.register(run.socket, selectors.EVENT_READ)

    def _request(self, run: _Run) -> None:
        try:
            message, fds, _, _ = socket.recv_fds(run.socket, 65536, 2)
        except ConnectionError:
            message, fds = b"", []
        if not message:
            return self._finish(run)
        request = json.loads(message)
        if request["do"] == "kill":
            for process in run.ranks:
                os.kill(process, signal.SIGKILL)
        else:
            process = os.fork()
            if process == 0:
                self._become_rank(fds, bytes.fromhex(request["token"]))
            run.ranks[process] = request["rank"]
            _tell(run, process=process, rank=request["rank"])
        for fd in fds:
            os.close(fd)

    def _become_rank(self, fds: list[int], token: bytes) -> None:
        try:
            template = os.getppid()
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # also ends a rank that is stuck in C code
            if os.getppid() != template:
                os._exit(1)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for number, fd in enumerate((fds[0], fds[1], fds[1])):
                os.dup2(fd, number)
            for fd in (*fds, self.wake, self.wake_write):
                os.close(fd)
            self.selector.close()
            for sock in (self.connection, *[run.socket for run in self.runs.values()]):
                sock.close()
            from . import child

            child.main(token, forked=True)
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
        finally:
            os._exit(1)

    def _reap(self) -> None:
        known = {process: run for run in self.runs.values() for process in run.ranks}
        while True:
            try:
                process, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if process == 0:
                break
            if process in known:
                run = known.pop(process)
                _tell(run, rank=run.ranks.pop(process), status=os.waitstatus_to_exitcode(status))
        for process in _children():
            if process not in known:  # started by a rank that has ended
                os.kill(process, signal.SIGKILL)

    def _finish(self, run: _Run) -> None:
        """The launcher closed the run's socket: nothing of the run may stay."""
        self.selector.unregister(run.socket)
        del self.runs[run.socket.fileno()]
        for process in run.ranks:
            os.kill(process, signal.SIGKILL)
        for process in run.ranks:
            os.waitpid(process, 0)
        run.socket.close()
        shutil.rmtree(run.folder, ignore_errors=True)

    def _end(self) -> None:
        for run in list(self.runs.values()):
            self._finish(run)
        self._reap()
        os._exit(0)


def _tell(run: _Run, **content) -> None:
    try:
        run.socket.send(json.dumps(content).encode(), socket.MSG_DONTWAIT)
    except OSError:
        return  # the launcher has gone: _finish comes next


def _children() -> list[int]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return [int(number) for number in file.read().split()]
    except OSError:
        return []


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
