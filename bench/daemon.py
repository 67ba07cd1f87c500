"""A daemon of one's own for as long as a `with` lasts. Shared by `bench` and `demo`."""

import contextlib
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

READY_SECONDS_MAX = 60.0
STOP_SECONDS_MAX = 180.0  # it saves what is in memory, as long as limits.drain lets it
READY_MARK = " is mounted "
LOG_LINES_SHOWN = 20


class DaemonFailed(Exception):
    """The daemon did not come up, or did not go away; the text says what it said."""


class NoFuse(DaemonFailed):
    """This machine, user or container cannot mount; the text says what to do about it."""


class Daemon:
    """One `ctx-mountd` in the foreground, in a session of its own so that Ctrl-C is ours alone."""

    def __init__(
        self,
        mount_point: Path,
        state: Path,
        arguments: list[str],
        environment: dict[str, str] | None = None,
        ready_seconds: float = READY_SECONDS_MAX,
        inside: Sequence[str] = (),
    ) -> None:
        """`inside`: what the command begins with where it is to run on another host."""
        self.mount_point = mount_point
        self.state = state
        self.log = state.parent / f"{state.name}.log"
        self._arguments = arguments
        self._environment = {**os.environ, **(environment or {})}
        self._ready_seconds = ready_seconds
        self._inside = inside
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start, and return when the mount answers. Raises DaemonFailed."""
        if self._process is not None:
            raise DaemonFailed("this daemon is already running")
        command = [*self._inside, str(program("ctx-mountd")), "--state", str(self.state)]
        command += self._arguments
        with self.log.open("ab") as log:
            process = self._process = subprocess.Popen(
                [*command, str(self.mount_point)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                env=self._environment,
            )
        assert process.stdout is not None
        if not _said_ready(process.stdout, self._ready_seconds):
            with contextlib.suppress(DaemonFailed):
                self.stop()
            raise DaemonFailed(f"{' '.join(command)}\ndid not come up:\n{self._last_words()}")

    def stop(self) -> None:
        """SIGTERM, wait, and see that nothing stays mounted. Raises DaemonFailed."""
        process, self._process = self._process, None
        if process is None:
            return
        faults = []
        if process.poll() is not None:
            faults.append(f"ended by itself with {process.returncode}")
        process.terminate()
        try:
            if process.wait(STOP_SECONDS_MAX) and not faults:
                faults.append(f"ended with {process.returncode}")
        except subprocess.TimeoutExpired:
            faults.append("ignored SIGTERM")
            process.kill()
            process.wait()
        if is_mounted(self.mount_point):
            faults.append("left its mount behind")
            unmount(self.mount_point, lazy=True)
        if faults:
            raise DaemonFailed(f"the daemon {' and '.join(faults)}:\n{self._last_words()}")

    def __enter__(self) -> "Daemon":
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def _last_words(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:]
        return "\n".join(f"    {line}" for line in lines) or "    (it said nothing)"


def _said_ready(output: IO[bytes], seconds: float) -> bool:
    """Wait for the ready line, and go on emptying the pipe so that nobody blocks on it.

    The thread ends with the last process that has the pipe.
    """
    answered = threading.Event()
    ready = False

    def drain() -> None:
        nonlocal ready
        with output:
            for line in output:
                if READY_MARK in line.decode(errors="replace"):
                    ready = True
                    answered.set()
        answered.set()

    threading.Thread(target=drain, daemon=True, name="ctx-mountd output").start()
    answered.wait(seconds)
    return ready


def program(name: str) -> Path:
    """The command `name` of the environment that runs this."""
    path = Path(sys.executable).parent / name
    if not path.exists():
        raise DaemonFailed(f"{path} is missing: install ctxfs into this environment first")
    return path


def check_fuse() -> None:
    """Raise NoFuse, with the remedy, where no FUSE file system can be mounted."""
    if not os.path.exists("/dev/fuse"):
        raise NoFuse(
            "there is no /dev/fuse. On a machine of your own: `modprobe fuse`. In a container: "
            "start it with `--device /dev/fuse --cap-add SYS_ADMIN`"
        )
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        raise NoFuse("/dev/fuse may not be opened by this user: `chmod 666 /dev/fuse` as root")
    if os.geteuid() != 0 and shutil.which("fusermount3") is None:
        raise NoFuse("an ordinary user needs fusermount3 to mount: `apt install fuse3` as root")


def is_mounted(path: Path) -> bool:
    """Whether the kernel lists `path` as a mount point, also when nobody answers there."""
    wanted = os.fsencode(path.absolute())
    return any(point == wanted for point, _ in mounts())


def mounts() -> Iterator[tuple[bytes, str]]:
    """Every mount point of this process and its file system type, in the order of mounting."""
    for line in Path("/proc/self/mounts").read_bytes().splitlines():
        _, point, kind = line.split(b" ")[:3]
        yield point.decode("unicode_escape").encode("latin-1"), kind.decode()


def remove_tree(path: Path) -> None:
    """Remove `path` with everything in it, and first unmount what a dead daemon left there."""
    inside = os.fsencode(path.absolute()) + b"/"
    for point, _ in reversed(list(mounts())):
        if point.startswith(inside):
            unmount(Path(os.fsdecode(point)), lazy=True)
    shutil.rmtree(path)


def unmount(path: Path, *, lazy: bool = False) -> None:
    """Unmount `path`; `lazy` also where somebody is still in it."""
    root = os.geteuid() == 0
    command = ["umount", *(["-l"] if lazy else [])]
    if not root:
        command = ["fusermount3", "-u", *(["-z"] if lazy else [])]
    subprocess.run([*command, str(path)], check=False, stderr=subprocess.DEVNULL)
