"""`ctx umount`: end a mount, and wait until its daemon is gone."""

import argparse
import contextlib
import errno
import json
import os
import select
import shutil
import signal
import subprocess
from collections.abc import Iterator
from typing import Any, NamedTuple

from . import _mounts
from ._cli import Subparsers, add_command
from ._common import (
    FAILED,
    NOT_FOUND,
    OK,
    Mount,
    ToolError,
    find_mount,
)
from ._output import print_json, waiting

ANSWER_S = 5.0  # how long a mount may take to give its statistics before it counts as hung
FORCE_S = 15.0  # how long a daemon may take to end before --force takes the mount away
NAMES_SHOWN = 5
DAEMONS = (b"ctx-mountd", b"mount.ctxfs")  # what its command line may name; or the module mountd


class User(NamedTuple):
    """A process that keeps a mount busy."""

    pid: int
    name: str


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    parser = add_command(subparsers, "umount", "end a mount and wait until it is gone", run)
    parser.add_argument(
        "-f", "--force", action="store_true", help="even if it is in use, or does not answer"
    )
    parser.add_argument("point", metavar="MOUNTPOINT", nargs="?", help="the mount to end")
    return parser


def run(args: argparse.Namespace) -> int:
    if args.point is not None:
        args.mount = args.point
    mount = find_mount(args, ())
    if not is_mounted(mount):
        raise ToolError("is not a ctxfs mount", subject=mount.point, exit_code=NOT_FOUND)
    pid, parent = daemon_of(mount)
    if not args.force:
        refuse_busy(mount)
    # Found before the mount ends: its number is not to be had afterwards.
    connection = connection_of(mount)
    with waiting(f"ending {mount.point}"):
        stopped = pid is not None and stop(pid, FORCE_S if args.force else None)
        if stopped and parent is not None:
            # It ends right after its child: then the state directory is free for the next.
            stop(parent, FORCE_S if args.force else None)
        if is_mounted(mount):
            if args.force and not stopped:
                abort(connection)
            detach(mount, lazily=args.force)
    if args.json:
        print_json({"mount": mount.point, "unmounted": True, "pid": pid})
    return OK


def is_mounted(mount: Mount) -> bool:
    """True while the kernel's table has it as a ctxfs mount."""
    return any(mounted.point == mount.point for mounted in _mounts.mounted())


def connection_of(mount: Mount) -> str | None:
    """The number of its FUSE connection."""
    for mounted in _mounts.mounted():
        if mounted.point == mount.point:
            return mounted.connection
    return None


def read_stats(mount: Mount, timeout_s: float = ANSWER_S) -> dict[str, Any] | None:
    """`.ctx/stats`, or None where nobody answers: a dead daemon, or one that hangs."""
    return read_control(mount, "stats", timeout_s)


def read_control(mount: Mount, name: str, timeout_s: float = ANSWER_S) -> dict[str, Any] | None:
    """A JSON object in `.ctx`, or None where it does not come.

    Read by another process, since a call into a hung mount ends only with its process.
    """
    try:
        done = subprocess.run(
            ["cat", "--", mount.control(name)],
            capture_output=True,
            timeout=timeout_s,
            check=True,
        )
        told = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return told if isinstance(told, dict) else None


def daemon_of(mount: Mount) -> tuple[int | None, int | None]:
    """The pids of the daemon behind a mount and of its parent, which not every daemon has.

    None too where it cannot be told from here.
    """
    stats = read_stats(mount) or {}
    return daemon_with(stats.get("pid")), daemon_with(stats.get("parent_pid"))


def daemon_with(pid: object) -> int | None:
    """The pid, if it is one, and that of a daemon."""
    if not isinstance(pid, int):
        return None
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().split(b"\0")
    except OSError:
        return None
    # Seen from another pid namespace the number may be somebody else's.
    is_daemon = any(
        os.path.basename(word) in DAEMONS or word.partition(b".")[0] == b"mountd" for word in words
    )
    return pid if is_daemon else None


def stop(pid: int, limit_s: float | None) -> bool:
    """Ask a daemon to end and wait for it; True once it is gone, False after `limit_s`.

    Raises ToolError where this user may not ask.
    """
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        signal.pidfd_send_signal(process, signal.SIGTERM)
        # A pidfd is readable once its process has ended.
        poll = select.poll()
        poll.register(process, select.POLLIN)
        return bool(poll.poll(None if limit_s is None else limit_s * 1000))
    except ProcessLookupError:
        return True
    except PermissionError:
        raise ToolError(
            "its daemon runs as another user", "unmount as that user or root", subject=f"pid {pid}"
        ) from None
    finally:
        os.close(process)


def abort(connection: str | None) -> None:
    """Make the kernel answer all that waits for a mount with an error; root only."""
    with (
        contextlib.suppress(OSError),
        open(f"/sys/fs/fuse/connections/{connection}/abort", "w", encoding="ascii") as file,
    ):
        file.write("1")


def detach(mount: Mount, *, lazily: bool) -> None:
    """Take a mount away without its daemon. Raises ToolError."""
    commands = [["fusermount3", "-u", *(["-z"] if lazily else []), mount.point]]
    if os.geteuid() == 0 or shutil.which("fusermount3") is None:
        commands.append(["umount", *(["-l"] if lazily else []), mount.point])
    told = ""
    for command in commands:
        if shutil.which(command[0]) is None:
            continue
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        if done.returncode == 0 or not is_mounted(mount):
            return
        told = done.stderr.strip()
    if "busy" in told.lower():
        refuse_busy(mount)
        raise ToolError("is busy", "close what uses it, or say --force", subject=mount.point)
    raise ToolError(
        f"could not be unmounted: {told or 'neither fusermount3 nor umount is here'}",
        "try as its owner or root",
        subject=mount.point,
    )


def refuse_busy(mount: Mount) -> None:
    """Raises ToolError, with the culprits, while processes use the mount."""
    users = list(users_of(mount))
    if not users:
        return
    names = ", ".join(f"{user.name} (pid {user.pid})" for user in users[:NAMES_SHOWN])
    more = f" and {len(users) - NAMES_SHOWN} more" if len(users) > NAMES_SHOWN else ""
    raise ToolError(
        f"is in use by {names}{more}",
        "end them, leave its directories, or say --force",
        subject=mount.point,
        exit_code=FAILED,
    )


def users_of(mount: Mount) -> Iterator[User]:
    """Processes with a working directory, an open file or a mapping below a mount.

    Only those that this user may look into.
    """
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            if _uses(name, mount.point):
                with open(f"/proc/{name}/comm", encoding="utf-8", errors="replace") as file:
                    yield User(int(name), file.read().strip())
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESRCH, errno.EACCES, errno.EPERM):
                raise


def _uses(pid: str, point: str) -> bool:
    beneath = point.rstrip("/") + "/"
    links = [f"/proc/{pid}/cwd", f"/proc/{pid}/root"]
    links += [entry.path for entry in os.scandir(f"/proc/{pid}/fd")]
    for link in links:
        with contextlib.suppress(OSError):
            target = os.readlink(link)
            if target == point or target.startswith(beneath):
                return True
    with open(f"/proc/{pid}/maps", "rb") as file:
        return b" " + os.fsencode(beneath) in file.read()
