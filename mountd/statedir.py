"""Who owns a state directory: one daemon, for as long as it lives."""

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from ctxfs.errors import DeviceBusy, unusable

PID_FILE = "daemon.pid"  # who answers
PARENT_FILE = "parent.pid"  # who starts the next if that one dies, where there is such a process


def default_state(uid: int, environ: Mapping[str, str]) -> Path:
    """Where state lies that nobody placed: the system's for root, else the user's own."""
    if uid == 0:
        return Path("/var/lib/ctxfs")
    home = environ.get("XDG_STATE_HOME", "")
    # The XDG specification has relative paths ignored.
    return (Path(home) if home.startswith("/") else Path.home() / ".local/state") / "ctxfs"


@contextmanager
def claim(state: Path, name: str = PID_FILE) -> Iterator[Path]:
    """Own a state directory: makes it, holds `daemon.pid` locked and takes it away at the end.

    A parent holds `parent.pid` so, and leaves `daemon.pid` to its child.

    The lock ends with the process, however it ends; the file alone says nothing. A start that
    fails leaves no directory that it made. Raises DeviceBusy, naming the process, where another
    daemon has the directory; NoRoom where its file system is full.
    """
    with ExitStack() as undo:
        try:
            _make(state, undo)
            fd = _locked(state / name)
            undo.callback(os.close, fd)
            undo.callback((state / name).unlink, missing_ok=True)
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        except OSError as error:
            raise unusable(f"state directory {state}", error) from None
        yield state / name


def owner(state: Path, name: str = PID_FILE) -> int | None:
    """The process that holds this file of a state directory, or None. Raises OSError.

    Takes the lock for a moment where nobody has it, so it is not for asking again and again.
    """
    try:
        fd = os.open(state / name, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _named_in(fd)
    finally:
        os.close(fd)
    return None


def named(state: Path, name: str = PID_FILE) -> int | None:
    """The process that a file of a state directory names, alive or not."""
    try:
        fd = os.open(state / name, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return _named_in(fd)
    finally:
        os.close(fd)


def _named_in(fd: int) -> int | None:
    first = os.pread(fd, 32, 0).partition(b"\n")[0]
    return int(first) if first.isdigit() else None


def _make(state: Path, undo: ExitStack) -> None:
    """Make a directory and those above it; an error takes away again what of that is empty."""
    missing = [path for path in (state, *state.parents) if not path.exists()]

    def unmake(kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            for path in missing:
                with suppress(OSError):
                    path.rmdir()

    undo.push(unmake)
    for path in reversed(missing):
        # As mkdir -p has it: what lies above is open to others, the end is not.
        path.mkdir(mode=0o700 if path == state else 0o777, exist_ok=True)


def _locked(path: Path) -> int:
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # Of a parent, the process that answers is told: others know of that one.
            pid = named(path.parent) or _named_in(fd) or "unknown"
            os.close(fd)
            raise DeviceBusy(
                f"{path.parent} belongs to the daemon with pid {pid}; "
                "give this mount a --state of its own"
            ) from None
        # The owner before may have unlinked the file between our open and our lock.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), os.stat(path)):
                return fd
        os.close(fd)
