"""`ctx device`: list the cold tier's devices, add one, drain one, grow one, while it is used."""

import argparse
import os
import threading
from typing import Any

from ctxfs import xattrs

from ._cli import Subparsers, add_command
from ._common import (
    CONTROL,
    FAILED,
    INTERRUPTED,
    NO_ROOM,
    OK,
    TIER_TROUBLE,
    USAGE,
    Mount,
    ToolError,
    failure,
    interruptible,
    open_mount,
)
from ._output import Table, escape, print_json, progress, short_size, waiting

ACTIONS = ("list", "add", "drain", "grow")
ATTRIBUTES = {
    "add": xattrs.DEVICE_ADD,
    "drain": xattrs.DEVICE_DRAIN,
    "grow": xattrs.DEVICE_GROW,
}
POLL_S = 0.25

# Where a drain does not go on by itself: the exit code, and what to do.
STOPPED = {
    "needs room": (NO_ROOM, "add a device, or unpin or remove blocks; then drain it again"),
    "unreadable": (TIER_TROUBLE, "`ctx verify --all` drops what is bad; then drain it again"),
    "drain failed": (TIER_TROUBLE, "see the daemon's log; then drain it again"),
    "lost": (TIER_TROUBLE, "bring it back and start the daemon again, or take it out for good"),
}

Device = dict[str, Any]


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    parser = add_command(
        subparsers, "device", "list, add, drain or grow the devices of the cold tier", run
    )
    parser.add_argument(
        "action", choices=ACTIONS, metavar="ACTION", help="list, add, drain or grow"
    )
    device = parser.add_argument(
        "device",
        nargs="?",
        metavar="DEVICE",
        help="the path of a file or block device; to add or grow it also path:size",
    )
    device.completer = complete_device  # type: ignore[attr-defined]  # argcomplete's way
    return parser


def complete_device(prefix: str, parsed_args: argparse.Namespace, **_unused: object) -> list[str]:
    """The devices that there are; to be added, what a directory holds."""
    try:
        if getattr(parsed_args, "action", None) == "add":
            parent, _, start = prefix.rpartition("/")
            where = f"{parent}/" if "/" in prefix else ""
            with os.scandir(where or ".") as entries:
                found = [
                    where + entry.name + ("/" if entry.is_dir() else "")
                    for entry in entries
                    if entry.name.startswith(start)
                ]
            return sorted(found)[:200]
        known = [each["path"] for each in devices(open_mount(parsed_args, ()))]
        return [path for path in known if path.startswith(prefix)]
    except (OSError, ToolError):
        return []  # completion must never put words on the user's line


def run(args: argparse.Namespace) -> int:
    if (args.action == "list") != (args.device is None):
        what = "list takes no device" if args.device else f"which device to {args.action}?"
        raise ToolError(what, "see ctx-device(1)", exit_code=USAGE)
    mount = open_mount(args, ())
    if args.action == "list":
        return _list(mount, as_json=args.json)
    path = os.path.abspath(args.device)
    ask(mount, args.action, path)
    if args.action == "drain":
        row = wait_drained(mount, path)
    else:
        row = wait_done(mount, args.action, path)
    if args.json:
        print_json(row)
    else:
        print(_told(args.action, row))
    return OK


def devices(mount: Mount) -> list[Device]:
    """What `.ctx/stats` says of each. Raises ToolError."""
    cold = mount.stats()["tiers"].get("cold")
    if cold is None:
        raise ToolError(
            "has no cold tier",
            "put a [[cold]] table into its configuration file, and start the daemon again",
            subject=mount.point,
        )
    found: list[Device] = cold["devices"]
    return found


def _list(mount: Mount, *, as_json: bool) -> int:
    found = devices(mount)
    if as_json:
        print_json(found)
        return OK
    table = Table(("STATE", ">CAPACITY", ">LIVE", ">FREE", ">LEFT", ">ERRORS", "ENGINE", "DEVICE"))
    table.rows = [
        (
            each["state"],
            short_size(each["capacity_bytes"]),
            short_size(each["live_bytes"]),
            short_size(each["free_bytes"]),
            short_size(each.get("left_bytes")),
            str(each["errors"]),
            each["engine"],
            escape(each["path"]),
        )
        for each in found
    ]
    table.print()
    return OK


# ---- asking, and waiting ---------------------------------------------------------------------


def ask(mount: Mount, action: str, device: str) -> None:
    """Have the daemon begin. Raises ToolError, in the daemon's own words where it has some."""
    control = os.path.join(mount.point, CONTROL)
    try:
        interruptible(os.setxattr, control, ATTRIBUTES[action], os.fsencode(device))
    except PermissionError as error:
        raise ToolError(
            "not permitted", "root and the daemon's own user may", subject=device
        ) from error
    except OSError as error:
        answer = failure(device, error)
        job = last_job(mount, action)
        if job is not None and job["error"]:
            raise ToolError(escape(job["error"]), exit_code=answer.exit_code) from error
        raise answer from error


def last_job(mount: Mount, action: str) -> dict[str, Any] | None:
    """What the daemon says of the last work of this kind. Raises ToolError.

    By what it does alone: the daemon may know the device by another link.
    """
    work = mount.stats()["tiers"].get("cold", {}).get("device_work", [])
    return next((each for each in reversed(work) if each["what"] == action), None)


def pause() -> None:
    """Between two looks at `.ctx/stats`."""
    threading.Event().wait(POLL_S)


def wait_done(mount: Mount, action: str, device: str) -> Device:
    """Return the device when it is added, or grown. Raises ToolError where that failed."""
    with waiting(f"{action} {escape(device)}"):
        while (job := last_job(mount, action)) is not None and job["state"] == "running":
            pause()
    if job is None:
        raise ToolError("the daemon knows nothing of it", "it has started anew", subject=device)
    if job["error"]:
        raise ToolError(escape(job["error"]), exit_code=FAILED)
    return _find(mount, job["path"])


def wait_drained(mount: Mount, device: str) -> Device:
    """Return the device when nothing is left on it. Raises ToolError where the drain stopped."""
    job = last_job(mount, "drain")
    path = job["path"] if job is not None else device
    row = _find(mount, path)
    total = done = row["left_bytes"] or 0
    with progress(f"draining {escape(path)}", total, sizes=True) as advance:
        try:
            while row["state"] == "draining":
                pause()
                row = _find(mount, path)
                left = row["left_bytes"] or 0
                advance(done - left)
                done = left
        except KeyboardInterrupt:
            raise ToolError(
                "the drain goes on without you",
                f"`ctx device list` shows how far it is; `ctx device add {escape(path)}` ends it",
                subject=path,
                exit_code=INTERRUPTED,
            ) from None
    if row["state"] != "drained":
        exit_code, remedy = STOPPED.get(row["state"], (FAILED, "it takes blocks again"))
        why = row.get("why") or row["state"]
        left = f"{row['left_blocks']} blocks ({short_size(row['left_bytes'])}) are left"
        raise ToolError(f"{left}: {escape(why)}", remedy, subject=path, exit_code=exit_code)
    return row


def _find(mount: Mount, path: str) -> Device:
    found = next((each for each in devices(mount) if each["path"] == path), None)
    if found is None:
        raise ToolError("is no device of the cold tier", "see `ctx device list`", subject=path)
    return found


def _told(action: str, row: Device) -> str:
    path = escape(row["path"])
    if action == "drain":
        return f"{path}: drained; take it out of the configuration file, then it can be pulled out"
    if action == "grow":
        size = short_size(row["capacity_bytes"])
        return f"{path}: {size} now; if the configuration file gives it a size, change that too"
    if row["state"] != "ok":
        return f"{path}: {row['state']}"
    return (
        f"{path}: added, {short_size(row['free_bytes'])} free; put it into the configuration "
        "file, else it is not there after the next start"
    )
