"""A process that answers a mount, as its parent sees it (as it sees itself: mountd/child.py)."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from mountd import child

PIPE_BYTES = 1 << 16


@dataclass(slots=True)
class Answerer:
    """A child as its parent sees it."""

    process: subprocess.Popen[bytes]
    pidfd: int
    pipe: int  # where it says that it is ready, or why not
    gate: socket.socket | None = None  # while it may not begin
    is_ready: bool = False
    text: str = ""

    def listen(self) -> None:
        """Take what it has said, which it does in one piece."""
        with suppress(BlockingIOError):
            said = os.read(self.pipe, PIPE_BYTES)
            self.is_ready = said.startswith(child.READY)
            self.text = said.removeprefix(child.READY).decode("utf-8", "backslashreplace")
            os.close(self.pipe)
            self.pipe = -1

    def bury(self) -> int:
        """Wait for its end; return the exit status, the signal that killed it as a negative one."""
        status = self.process.wait()
        if self.pipe >= 0:
            self.listen()
        for fd in (self.pipe, self.pidfd):
            if fd >= 0:
                os.close(fd)
        if self.gate is not None:
            self.gate.close()
        return status

    def kill(self) -> None:
        self.process.kill()
        self.bury()


def start(
    command: Sequence[str], given: Mapping[str, object], *, keep: int, gated: bool
) -> Answerer:
    """Start one, with what is `given` in its environment and the descriptor `keep`.

    `gated`: it begins with nothing before its gate says so. Raises OSError.
    """
    pipe, theirs = os.pipe()
    ours, gate = socket.socketpair() if gated else (None, None)
    own = {child.READY_FD: theirs, child.PARENT: os.getpid()}
    if gate is not None:
        own[child.GATE_FD] = gate.fileno()
    # What systemd says is for us: it does not listen to children.
    kept = {name: value for name, value in os.environ.items() if name != "NOTIFY_SOCKET"}
    try:
        process = subprocess.Popen(
            command,
            env=kept | {name: str(value) for name, value in {**given, **own}.items()},
            pass_fds=[keep, theirs, *([] if gate is None else [gate.fileno()])],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            process_group=0,  # Ctrl-C is for us, and comes from us
        )
    finally:
        os.close(theirs)
        if gate is not None:
            gate.close()
    os.set_blocking(pipe, False)
    return Answerer(process, os.pidfd_open(process.pid), pipe, ours)
