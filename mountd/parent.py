"""`ctx-mountd` on the direct channel: holds /dev/fuse, and starts the process that answers.

If that one dies, the next takes over the mount, and programs that wait go on waiting meanwhile.
So nothing is done here that could fail: no loop, no state but the few names below.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ctxfs.errors import CtxfsError, unusable
from mountd import child, device_fuse, logs, statedir, systemd
from mountd.answerer import Answerer, start

log = logging.getLogger(__name__)

STORE_NAME = "ctxfs-mount"
DEATHS_MAX = 5
DEATHS_WITHIN_S = 60.0
BUG = 1  # the exit status of an error that nobody expected
ENDING = (signal.SIGTERM, signal.SIGINT)
HEEDED = (*ENDING, signal.SIGHUP, signal.SIGUSR1)


class ChildFailed(CtxfsError):
    """The process that was to answer ended; the text is finished, names of programs included."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


class Parent:
    """Runs `command` as its child, one after the other, each with the same descriptor."""

    def __init__(
        self,
        command: Sequence[str],
        fd: int,
        *,
        point: Path,
        pid_file: Path,
        signals: socket.socket,
        announce: Callable[[str], None],
        log_name: str,
    ) -> None:
        self._command = command
        self._fd = fd
        self._point = point
        self._pid_file = pid_file
        self._signals = signals
        self._announce = announce
        self._log_name = log_name
        self._was_ready = not device_fuse.is_unused(fd)  # or it has one from its predecessor
        self._is_announced = False
        self._device = device_fuse.mounted_at(point) if self._was_ready else None
        self._stored = systemd.store(STORE_NAME, fd)
        self._restarts = 0
        self._deaths: deque[float] = deque(maxlen=DEATHS_MAX)
        self._ending = False
        self._held: int | None = None  # a signal for a child that cannot take it yet
        self._heir: Answerer | None = None  # loads, while the child still answers
        self._replacements = 0
        self._is_replacing = False

    def run(self) -> int:
        """Serve until the mount is ended, and return the exit status. Raises ChildFailed."""
        self._child = self._start()
        try:
            while (status := self._step()) is None:
                pass
            return status
        finally:
            self._clear()

    def _step(self) -> int | None:
        """Wait for what happens next, and do what it asks for. Returns the status at the end."""
        now, heir = self._child, self._heir
        fds = [self._signals.fileno(), now.pidfd, now.pipe]
        fds += [each.gate.fileno() for each in (now, heir) if each is not None and each.gate]
        poll = select.poll()
        for fd in (fd for fd in fds if fd >= 0):  # the pipe's is -1 when all was said
            poll.register(fd, select.POLLIN)
        happened = {fd for fd, _ in poll.poll()}
        if self._signals.fileno() in happened:
            for number in self._signals.recv(64):
                self._heed(number)
        elif heir is not None and heir.gate is not None and heir.gate.fileno() in happened:
            self._hand_over(heir)
        elif now.gate is not None and now.gate.fileno() in happened and now.gate.recv(1):
            self._open(now)
        elif now.pipe in happened:
            now.listen()
            if now.is_ready:
                self._answers(now)
        elif now.pidfd in happened:
            return self._died(now)
        return None

    # -- children

    def _start(self, *, gated: bool = False) -> Answerer:
        given = {
            child.FUSE_FD: self._fd,
            child.RESTARTS: self._restarts,
            child.POINT: self._point,
            child.STATE: self._pid_file.parent,
            **({child.STORED: 1} if self._stored else {}),
        }
        return start(self._command, given, keep=self._fd, gated=gated)

    def _answers(self, now: Answerer) -> None:
        self._device = device_fuse.mounted_at(self._point)
        self._was_ready = True
        if self._is_announced:
            log.info("%s", now.text)
            systemd.status(now.text)
        else:
            self._is_announced = True
            self._announce(now.text)
            systemd.ready(now.text)
        self._replaced("")
        if self._held is not None:
            now.process.send_signal(self._held)

    def _died(self, now: Answerer) -> int | None:
        """Start the next one, or return the status to end with. Raises ChildFailed."""
        pid, status = now.process.pid, now.bury()
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        why = "" if now.is_ready else now.text
        if status == 0 or self._ending:
            return status if status >= 0 else 128 - status
        if status > BUG or not self._was_ready:
            if why or not self._is_announced:
                why = why or f"ctx-mountd: the daemon {how} before the mount answered"
                raise ChildFailed(why, status if status > 0 else BUG)
            log.error("the daemon (pid %d) %s", pid, how)
            return status
        self._deaths.append(time.monotonic())
        if len(self._deaths) == DEATHS_MAX:
            within = self._deaths[-1] - self._deaths[0]
            if within <= DEATHS_WITHIN_S:
                raise ChildFailed(
                    f"ctx-mountd: the daemon died {DEATHS_MAX} times within {within:.0f} s, the "
                    f"last time it {how}: {self._point} is unmounted; for the reason see "
                    f"{self._log_name}",
                    BUG,
                )
        self._restarts += 1
        log.error("the daemon (pid %d) %s; restart %d%s", pid, how, self._restarts,
                  f": {why}" if why else "")  # fmt: skip
        try:
            self._child, self._heir = self._heir or self._start(), None
        except OSError as error:
            raise unusable("the next daemon cannot be started", error) from error
        return None

    # -- replacing

    def _replace(self) -> None:
        """SIGUSR1: load a successor while the child goes on."""
        if self._is_replacing or self._ending:
            return  # the outcome of that is the answer to this
        self._is_replacing = True
        if not self._child.is_ready:
            self._replaced("it is only just starting")
            return
        try:
            self._heir = self._start(gated=True)
        except OSError as error:
            self._replaced(f"a process cannot be started: {error}")

    def _hand_over(self, heir: Answerer) -> None:
        """The successor is loaded, or failed at it."""
        assert heir.gate is not None
        self._heir = None
        if not heir.gate.recv(1):
            status = heir.bury()
            self._replaced(heir.text or f"it ended with status {status}")
            return
        log.info("replacing the daemon (pid %d)", self._child.process.pid)
        self._child.kill()
        self._child = heir
        self._open(heir)

    def _open(self, now: Answerer) -> None:
        assert now.gate is not None
        with suppress(BrokenPipeError), now.gate as gate:
            gate.send(b"g")
        now.gate = None

    def _replaced(self, reason: str) -> None:
        """Tell `ctx-mountd --replace`: how often, in the second line, then why not if not."""
        if not self._is_replacing:
            return
        self._is_replacing = False
        self._replacements += 1
        if reason:
            log.error("not replaced, the daemon goes on: %s", reason)
        first, count = f"{os.getpid()}\n".encode(), f"{self._replacements:08}\n".encode()
        try:
            fd = os.open(self._pid_file, os.O_WRONLY | os.O_CLOEXEC)
            # The number last, at its place: whoever sees it grow sees the reason too.
            os.ftruncate(fd, len(first))
            os.pwrite(fd, reason.encode("utf-8", "backslashreplace"), len(first) + len(count))
            os.pwrite(fd, count, len(first))
            os.close(fd)
        except OSError as error:  # no reason to end a mount
            log.error("%s: %s", self._pid_file, error.strerror)

    # -- the end

    def _heed(self, number: int) -> None:
        if number in ENDING:
            self._end(number)
        elif number == signal.SIGUSR1:
            self._replace()
        elif number == signal.SIGHUP:
            logs.reopen()
            if self._child.is_ready:  # one that starts reads the file anyway
                self._child.process.send_signal(number)

    def _end(self, number: int) -> None:
        if self._heir is not None:
            self._heir.kill()
            self._heir = None
        # A successor that is starting is told when it answers, so that it drains. A second signal
        # is from somebody who does not want to wait.
        if self._ending or self._child.is_ready or not self._was_ready:
            self._child.process.send_signal(number)
        else:
            self._held = number
        if not self._ending:
            self._ending = True
            systemd.stopping("ending the mount")
            systemd.forget(STORE_NAME)
            if self._was_ready:
                self._let_go()

    def _let_go(self) -> None:
        """From here on the mount ends with the child, however that ends."""
        os.close(self._fd)
        self._fd = -1

    def _clear(self) -> None:
        """Leave no process, no mount and no descriptor."""
        for each in (self._heir, self._child):
            if each is not None and each.process.returncode is None:
                each.kill()
        shown = device_fuse.mounted_at(self._point)
        began = self._fd >= 0 and not device_fuse.is_unused(self._fd)
        if shown is not None and shown == (self._device or (shown if began else None)):
            device_fuse.end(self._point)
        if self._fd >= 0:
            self._let_go()
        systemd.forget(STORE_NAME)


def supervise(
    command: Sequence[str],
    *,
    point: Path,
    state: Path,
    announce: Callable[[str], None],
    log_name: str = "its standard error",
) -> int:
    """Keep `point` answered by `command`, until the mount is ended; return the exit status.

    `announce` hears once that it answers. Raises ChildFailed, DeviceBusy, ConfigError.
    """
    with _heeding() as signals, statedir.claim(state, statedir.PARENT_FILE) as pid_file:
        try:
            fd = descriptor(point)
        except OSError as error:
            raise unusable(str(device_fuse.DEVICE), error) from error
        return Parent(
            command,
            fd,
            point=point,
            pid_file=pid_file,
            signals=signals,
            announce=announce,
            log_name=log_name,
        ).run()


def descriptor(point: Path) -> int:
    """Take the descriptor that a parent which died left with systemd, or open a new one.

    Raises OSError.
    """
    for fd in systemd.stored(STORE_NAME):
        alive = device_fuse.is_mounted(fd) and device_fuse.mounted_at(point) is not None
        if alive or device_fuse.is_unused(fd):
            return fd
        os.close(fd)
        systemd.forget(STORE_NAME)
    return device_fuse.open_device()


@contextmanager
def _heeding() -> Iterator[socket.socket]:
    """Signals as bytes of a socket, for as long as this lasts."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        before = {number: signal.signal(number, lambda *_: None) for number in HEEDED}
        wakeup = signal.set_wakeup_fd(theirs.fileno())
        try:
            yield ours
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in before.items():
                signal.signal(number, handler)
