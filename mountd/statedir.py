"""Who owns a state directory: one daemon, for as long as it lives."""

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from ctxfs.errors import DeviceBusy, unusable

PID_FILE = "daemon.pid"


def default_state(uid: int, environ: Mapping[str, str]) -> Path:
    """Where state lies that nobody placed: the system's for root, else the user's own."""
    if uid == 0:
        return Path("/var/lib/ctxfs")
    home = environ.get("XDG_STATE_HOME", "")
    # The XDG specification has relative paths ignored.
    return (Path(home) if home.startswith("/") else Path.home() / ".local/state") / "ctxfs"


@contextmanager
def claim(state: Path) -> Iterator[Path]:
    """Own a state directory: makes it, holds `daemon.pid` locked and takes it away at the end.

    The lock ends with the process, however it ends; the file alone says nothing. A start that
    fails leaves no directory that it made. Raises DeviceBusy, naming the process, where another
    daemon has the directory; NoRoom where its file system is full.
    """
    with ExitStack() as undo:
        try:
            _make(state, undo)
            fd = _locked(state / PID_FILE)
            undo.callback(os.close, fd)
            undo.callback((state / PID_FILE).unlink, missing_ok=True)
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        except OSError as error:
            raise unusable(f"state directory {state}", error) from None
        yield state / PID_FILE


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
            owner = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(fd)
            raise DeviceBusy(
                f"{path.parent} belongs to the daemon with pid {owner}; "
                "give this mount a --state of its own"
            ) from None
        # The owner before may have unlinked the file between our open and our lock.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), os.stat(path)):
                return fd
        os.close(fd)
