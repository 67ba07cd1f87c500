"""A real daemon on a real mount, in a process of its own, and nothing left behind."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import random
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")

MIB = 1 << 20
START_S = 30.0
STOP_S = 60.0
LOG_SHOWN = 8000  # characters


class Daemon:
    """`ctx-mountd` on `mount`, with what it needs below `base`. Use as a context manager."""

    def __init__(
        self,
        base: Path,
        *,
        hot: str = "64MiB",
        cold: str | None = None,
        config: str = "",
        arguments: tuple[str, ...] = (),
        run_as: list[str] | None = None,
        channel: str = "auto",
    ) -> None:
        self.mount = base / "ctx"
        self.state = base / "state"
        self.log_path = base / "log"
        self.cold_path = base / "cold"
        self.mount.mkdir(exist_ok=True)
        self.state.mkdir(mode=0o700, exist_ok=True)
        toml = base / "ctxfs.toml"
        toml.write_text(config)
        self.command = [
            *(run_as or []),
            sys.executable,
            "-m",
            "mountd.cli",
            "-c",
            str(toml),
            "--state",
            str(self.state),
            "--hot",
            hot,
            *(("--cold", f"{self.cold_path}:{cold}") if cold else ()),
            "--channel",
            channel,
            *arguments,
            str(self.mount),
        ]
        self.process: subprocess.Popen[str] | None = None
        self.refused_with = 0  # exit status of a daemon that did not start

    def start(self) -> Daemon:
        """Start, and return when the mount answers."""
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                self.command, stdout=subprocess.PIPE, stderr=log, text=True, cwd="/"
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if "is mounted" not in line:
            self.refused_with = self.process.wait(STOP_S)
            self._close()
            raise AssertionError(f"the daemon did not start: {line!r}\n{self.log()}")
        return self

    @property
    def channel(self) -> str:
        """How it speaks to the kernel."""
        return str(self.stats()["channel"])

    @property
    def pid(self) -> int:
        """The process that answers."""
        return int((self.state / "daemon.pid").read_text())

    def stop(self) -> int:
        """End it as an operator does; return its exit status."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(STOP_S)
        self._close()
        return status

    def kill(self) -> None:
        """End it without a chance to do anything: its parent too, so that the mount is dead."""
        assert self.process is not None
        # Stopped, the parent starts no other; while it lives, its children are known.
        self.process.send_signal(signal.SIGSTOP)
        for child in children(self.process.pid):
            kill_and_wait(child)
        self.process.kill()
        self.process.wait(STOP_S)
        self._close()

    def kill_child(self) -> int:
        """End the process that answers, without a chance to do anything; returns its pid.

        Its parent starts the next one: see `wait_for_successor`.
        """
        pid = self.pid
        kill_and_wait(pid)
        return pid

    def wait_for_successor(self, of: int) -> int:
        """Wait until another process than `of` has claimed the state directory; return its pid."""
        text = self.state / "daemon.pid"
        wait_until(lambda: text.read_text().strip() not in ("", str(of)))
        return self.pid

    def _close(self) -> None:
        assert self.process is not None
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.process = None

    def restart(self) -> None:
        """Stop and start again."""
        assert self.stop() == 0, self.log()
        self.start()

    def crash(self) -> None:
        """Kill and start again."""
        self.kill()
        self.start()

    def log(self) -> str:
        """Everything it has logged."""
        return self.log_path.read_text(errors="replace")

    def stats(self) -> dict[str, Any]:
        """`.ctx/stats`."""
        result: dict[str, Any] = json.loads((self.mount / ".ctx/stats").read_text())
        return result

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        """The recent events, of one kind or all."""
        lines = (self.mount / ".ctx/events.recent").read_text().splitlines()
        events = [json.loads(line) for line in lines]
        return [event for event in events if kind in (None, event["event"])]

    def get(self, key: str, name: str) -> str:
        """One `user.ctx.*` attribute as text."""
        return os.getxattr(self.mount / key, f"user.ctx.{name}").decode()

    def set(self, key: str, name: str, value: str) -> None:
        """Set one `user.ctx.*` attribute."""
        os.setxattr(self.mount / key, f"user.ctx.{name}", value.encode())

    def put(self, key: str, content: bytes) -> Path:
        """Write a block in one go and return its path."""
        path = self.mount / key
        path.write_bytes(content)
        return path

    def wait_sealed(self, key: str) -> None:
        """Sealing follows close after a moment."""
        wait_until(lambda: self.get(key, "state") == "sealed")

    def __enter__(self) -> Daemon:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        if self.process is not None:
            if self.process.poll() is None:
                try:
                    self.stop()
                except subprocess.TimeoutExpired:
                    self.kill()
            else:
                self._close()
        self.clean()
        sys.stdout.write(self.log()[-LOG_SHOWN:])  # pytest shows it where the test failed
        self.cold_path.unlink(missing_ok=True)  # hundreds of them would fill the disk

    def clean(self) -> None:
        """Unmount whatever a killed daemon left; fails the test if a mount then remains."""
        for path in (self.mount, self.state / "hot", self.state / "warm"):
            with contextlib.suppress(OSError, subprocess.CalledProcessError):
                while is_mounted(path):
                    subprocess.run(["umount", "-l", str(path)], check=True, capture_output=True)
        assert not is_mounted(self.mount)


def children(pid: int) -> list[int]:
    """The processes that a process has started, and not waited for."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(path.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(path.parent.name))
    return found


def kill_and_wait(pid: int) -> None:
    """SIGKILL, and return when the process has let go of everything."""
    process = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(process, signal.SIGKILL)
        poll = select.poll()
        poll.register(process, select.POLLIN)
        assert poll.poll(STOP_S * 1000), f"process {pid} does not end"
    finally:
        os.close(process)


def is_mounted(path: Path) -> bool:
    """Whether the mount table has this mount point."""
    words = (line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines())
    return str(path) in words


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Poll; fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.01)


class Actor:
    """Another process that goes on, step by step, with what a generator does between its yields.

    Use as a context manager. At the end it is told to leave by itself, if it has not ended yet.
    """

    def __init__(self, play: Callable[[], Iterator[Any]]) -> None:
        self._orders, orders = os.pipe()
        answers, self._answers = os.pipe()
        self._ended = False
        self.pid = os.fork()
        if self.pid == 0:
            os.close(orders)
            os.close(answers)
            self._act(play)
        os.close(self._orders)
        os.close(self._answers)
        self._orders, self._answers = orders, answers

    def _act(self, play: Callable[[], Iterator[Any]]) -> NoReturn:
        status = 1
        for number in (signal.SIGTERM, signal.SIGHUP):  # what runs the tests may heed them
            signal.signal(number, signal.SIG_DFL)
        steps: Iterator[Any] | None = None
        try:
            while os.read(self._orders, 1) == b"n":
                answer: Any
                try:
                    steps = steps or play()
                    answer = next(steps, None)
                except BaseException as error:
                    traceback.print_exc()
                    answer = error
                content = pickle.dumps(answer)
                os.write(self._answers, len(content).to_bytes(8, "little") + content)
            status = 0
        finally:
            os._exit(status)

    def go(self) -> None:
        """Let it go on to its next yield."""
        os.write(self._orders, b"n")

    def answer(self) -> Any:
        """Return what it yields; raises what it raised."""
        with os.fdopen(os.dup(self._answers), "rb", buffering=0) as pipe:
            length = int.from_bytes(_exactly(pipe, 8), "little")
            answer = pickle.loads(_exactly(pipe, length))
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def step(self) -> Any:
        """Let it go on and wait for what it yields or raises."""
        self.go()
        return self.answer()

    def end(self, number: int | None = None) -> int:
        """End it, by a signal if one is given, and return its exit status."""
        if self._ended:
            return 0
        self._ended = True
        if number is not None:
            os.kill(self.pid, number)
        with contextlib.suppress(BrokenPipeError):
            os.write(self._orders, b"q")  # closing is not enough: younger actors hold it too
        os.close(self._orders)
        _, status = os.waitpid(self.pid, 0)
        os.close(self._answers)
        return os.waitstatus_to_exitcode(status)

    def __enter__(self) -> Actor:
        return self

    def __exit__(self, *exc: object) -> None:
        self.end()


def _exactly(pipe: io.FileIO, length: int) -> bytearray:
    content = bytearray()
    while len(content) < length:
        piece = pipe.read(length - len(content))
        assert piece, "the process ended"
        content += piece
    return content


def elsewhere(action: Callable[[], T]) -> T:
    """Run `action` in another process and return, or raise, what it does."""

    def play() -> Iterator[Any]:
        yield action()

    with Actor(play) as actor:
        result: T = actor.step()
    return result


def run_as(uid: int, action: Callable[[], T]) -> T:
    """Like `elsewhere`, as another user without any groups but one of the same number."""

    def as_them() -> T:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
        return action()

    return elsewhere(as_them)


def together(actions: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run all actions at once, each in a process of its own; return what they return."""

    def play_of(action: Callable[[], Any]) -> Callable[[], Iterator[Any]]:
        def play() -> Iterator[Any]:
            yield action()

        return play

    with contextlib.ExitStack() as stack:
        actors = [stack.enter_context(Actor(play_of(action))) for action in actions]
        for actor in actors:
            actor.go()
        return [actor.answer() for actor in actors]


def noise(number: int, length: int) -> bytes:
    """Return bytes that are the same for the same arguments and repeat nowhere near."""
    return random.Random(number).randbytes(length)


def read_or_none(path: Path) -> bytes | None:
    """Return the content, None for a miss."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def other_process(code: str, *arguments: object) -> str:
    """Run Python code in a fresh process (`sys.argv[1:]` are the arguments); return its output."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
