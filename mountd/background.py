"""`--daemon`: the command returns when the mount answers, or with the reason why it does not."""

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ctxfs.errors import unusable

_READY = b"ready\n"

Announce = Callable[[str], None]
"""Called once, with the line that says the mount answers."""


def detach(
    work: Callable[[Announce], int],
    explain: Callable[[BaseException], str],
    error_file: Path | None = None,
) -> int:
    """Run `work` in a process of its own, and return in both.

    In the child: what `work` returned. In the parent: 0 once `work` announced itself, its line
    printed; else the child's exit status, after the `explain`ed reason was printed.
    Call it before anything is opened: threads, rings and mounts do not survive a fork.
    The child lets go of the terminal; its standard error goes to `error_file`, if there is one.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return _wait(pid, reader)
    os.close(reader)
    os.setsid()
    os.chdir("/")
    return _work(work, explain, error_file, writer)


def _work(
    work: Callable[[Announce], int],
    explain: Callable[[BaseException], str],
    error_file: Path | None,
    writer: int,
) -> int:
    told = False

    def tell(message: bytes) -> None:
        nonlocal told
        if not told:
            told = True
            with suppress(BrokenPipeError):  # the starter was killed: the mount is no worse for it
                os.write(writer, message)
            os.close(writer)

    try:
        _let_go(error_file)
        return work(lambda line: tell(_READY + _encoded(line)))
    except BaseException as error:
        tell(_encoded(explain(error)))
        raise
    finally:
        tell(b"")


def _let_go(error_file: Path | None) -> None:
    """Keep nothing of the caller's open, or whoever reads its output waits for the daemon.

    Raises ConfigError, or NoRoom, when `error_file` cannot be opened.
    """
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    # First of all, so that a log file that cannot be opened is told once, by the starter.
    _put(null, 0, 1, 2)
    if error_file is None:
        return
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
    try:
        errors = os.open(error_file, flags, 0o644)
    except OSError as error:
        raise unusable(f"log file {error_file}", error) from None
    _put(errors, 2)


def _put(fd: int, *places: int) -> None:
    """Have `fd` in these places, and nowhere else."""
    for place in places:
        os.dup2(fd, place)
    if fd > 2:
        os.close(fd)


def _wait(pid: int, reader: int) -> int:
    with os.fdopen(reader, "rb") as pipe:
        message = pipe.read()  # to its end: the child closes it when it has spoken, or dies
    if message.startswith(_READY):
        sys.stdout.write(_decoded(message.removeprefix(_READY)) + "\n")
        sys.stdout.flush()
        return 0
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    reason = _decoded(message)
    if not reason:
        how = f"was ended by signal {-code}" if code < 0 else f"ended with status {code}"
        reason = f"the daemon {how} before the mount answered"
    sys.stderr.write(reason + "\n")
    return code if code > 0 else 1


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _decoded(text: bytes) -> str:
    return text.decode("utf-8", "backslashreplace")
