"""What the process that answers has from its parent (mountd/parent.py), by its environment."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
from collections.abc import MutableMapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ctxfs.config import Config
from mountd import channels

FUSE_FD = "CTXFS_FUSE_FD"  # the descriptor of /dev/fuse
READY_FD = "CTXFS_READY_FD"  # a pipe; what is said there: see `Child`
GATE_FD = "CTXFS_GATE_FD"  # a socket: a byte says "loaded", one that comes back "go on"
PARENT = "CTXFS_PARENT"  # its process id
STORED = "CTXFS_STORED"  # 1: the descriptor outlives the parent, too
RESTARTS = "CTXFS_RESTARTS"  # how many children died before this one
POINT = "CTXFS_POINT"  # where the mount is, and
STATE = "CTXFS_STATE"  # where its state: neither can change while it lasts

READY = b"ready\n"  # comes before the line that says the mount answers
REASON_BYTES_MAX = 32 << 10  # a pipe takes twice that while nobody reads

PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(slots=True)
class Child:
    """This process as the child of a parent.

    Once, it says into the pipe either READY and a line, or why it did not come to that: one text,
    finished for people.
    """

    fuse_fd: int
    ready_fd: int
    gate_fd: int | None
    point: Path
    state: Path
    spoke: bool = False

    def placed(self, config: Config) -> Config:
        """The configuration, with what cannot change while the mount lasts as it is."""
        mount = replace(config.mount, path=self.point)
        if channels.choose(mount.channel).name != channels.DIRECT:
            mount = replace(mount, channel="direct")
        return replace(config, state=self.state, mount=mount)

    def wait_for_turn(self) -> None:
        """Say that all is loaded, and wait until the process before is gone, if there is one."""
        if self.gate_fd is None:
            return
        with socket.socket(fileno=self.gate_fd) as gate:
            self.gate_fd = None
            gate.send(b"l")
            if not gate.recv(1):
                raise SystemExit(0)  # not wanted any more

    def announce(self, line: str) -> None:
        """The mount answers."""
        self._say(READY + line.encode("utf-8", "surrogateescape"))

    def explain(self, reason: str) -> bool:
        """Say why it did not come to that. False, and nothing said, where it did."""
        if self.spoke:
            return False
        self._say(reason.encode("utf-8", "surrogateescape")[-REASON_BYTES_MAX:])
        return True

    def _say(self, text: bytes) -> None:
        self.spoke = True
        with suppress(BrokenPipeError):
            os.write(self.ready_fd, text)
        os.close(self.ready_fd)


def taken(environ: MutableMapping[str, str] = os.environ) -> Child | None:
    """What a parent gave to this process; None where there is none. Asks once.

    From here on, the process does not outlive its parent: it ends as by SIGTERM, and unmounts; or,
    where the next parent finds the descriptor, at once.
    """
    if FUSE_FD not in environ:
        return None
    numbers = {name: int(environ.pop(name)) for name in (FUSE_FD, READY_FD)}
    gate = environ.pop(GATE_FD, None)
    for fd in (*numbers.values(), *([] if gate is None else [int(gate)])):
        os.set_inheritable(fd, False)
    die_with(int(environ[PARENT]), signal.SIGKILL if STORED in environ else signal.SIGTERM)
    return Child(
        numbers[FUSE_FD],
        numbers[READY_FD],
        None if gate is None else int(gate),
        Path(environ.pop(POINT)),
        Path(environ.pop(STATE)),
    )


def die_with(parent: int, number: signal.Signals) -> None:
    """Have the kernel send this signal to us when our parent dies; also if it has died already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, number.value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def restarts() -> int:
    """How many processes answered this mount before this one, and died."""
    return int(os.environ.get(RESTARTS, "0"))


def parent_pid() -> int | None:
    """The process that starts the next one if this one dies; None where there is none."""
    pid = os.environ.get(PARENT)
    return None if pid is None else int(pid)
