"""`ctx doctor`: what kernel, user and machine allow, how mounts fare, and what to do about it."""

import argparse
import dataclasses
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from . import _cluster, _drives, _machine, _mounts
from ._cli import Subparsers, add_command
from ._common import (
    FAILED,
    OK,
    Mount,
)
from ._machine import FAIL, WARN, Check, Machine
from ._output import STYLES, console, escape, is_terminal, print_json
from .umount import read_control, read_stats

PROBE_S = 3.0
CONNECTIONS = "/sys/fs/fuse/connections"  # fusectl: a directory for each mount
AGAIN_S = 1.0  # who waits at both ends of this is not just being answered


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    return add_command(
        subparsers, "doctor", "tell what this machine allows, and how its mounts fare", run
    )


def run(args: argparse.Namespace) -> int:
    machine = Machine.here()
    explicit = getattr(args, "mount", None)
    mounts = [mount for mount in _mounts.mounted() if explicit in (None, mount.point)]
    stats = {mount.point: read_stats(Mount(mount.point), PROBE_S) for mount in mounts}
    hot_bytes = sum(
        told["tiers"].get("hot", {}).get("capacity_bytes", 0) for told in stats.values() if told
    )
    checks = list(_machine.checks(machine, hot_bytes))
    checks.append(_drives.check_nvme(machine))
    for mount in mounts:
        told = stats[mount.point]
        checks += mount_checks(machine, mount, told)
        if told is not None and told.get("cluster") is not None:
            peers = read_control(Mount(mount.point), "peers", PROBE_S)
            checks += _cluster.checks(mount.point, peers, told["cluster"])
    if not mounts:
        checks.append(Check("mounts", _machine.OK, "none", "`ctx mount` makes one"))
    _tell(checks, as_json=args.json)
    return FAILED if any(check.state == FAIL for check in checks) else OK


def mount_checks(
    machine: Machine,
    mount: _mounts.Mounted,
    stats: dict[str, Any] | None,
    pause: Callable[[float], None] = time.sleep,
) -> Iterator[Check]:
    """How one mount fares. `stats` is None where nobody answered for them in time."""
    name = f"mount {mount.point}"
    if stats is None:
        yield _silent(name, mount, f"{CONNECTIONS}/{mount.connection}")
    else:
        parent = stats.get("parent_pid")  # the daemon may be older than this tool
        of = "" if parent is None else f" (parent {parent})"
        yield Check(
            name,
            _machine.OK,
            f"answers: pid {stats['pid']}{of}, {stats['blocks']['total']} blocks",
        )
        if restarts := stats.get("restarts", 0):
            yield Check(
                f"restarts {mount.point}",
                WARN,
                f"the daemon died {restarts} times, and was followed by another",
                "see its log for the reasons",
            )
        if overdue := stats["counters"].get("overdue", 0):
            yield Check(
                f"overdue {mount.point}",
                WARN,
                f"{overdue} requests waited too long, and were ended with an error",
                "see its log, and `ctx events --kind overdue`: mostly a device hangs",
            )
        if "channel_why" in stats:
            yield channel_check(mount.point, stats)
        yield from device_checks(stats["tiers"])
    yield requests_check(machine, mount, (stats or {}).get("requests"), pause)


def requests_check(
    machine: Machine,
    mount: _mounts.Mounted,
    told: dict[str, Any] | None,
    pause: Callable[[float], None],
) -> Check:
    """How many requests the kernel has waiting for an answer, whether or not the daemon lives.

    `told`: what the daemon says of it, if it does. The mount itself is not touched.
    """
    name, connection = f"requests {mount.point}", f"{CONNECTIONS}/{mount.connection}"
    if not (machine.root / connection.lstrip("/")).is_dir():
        remedy = f"mount -t fusectl none {CONNECTIONS}, as root, shows who waits"
        return Check(name, _machine.OK, "cannot be counted: fusectl is not mounted", remedy)
    count = _waiting(machine, connection)
    if count:
        pause(AGAIN_S)
        count = min(count, _waiting(machine, connection) or 0)
    if count is None:
        return Check(name, _machine.OK, "not yours to count", "run as the mount's owner, or root")
    if not count:
        return Check(name, _machine.OK, "none has to wait")
    if told is not None and told["longest_s"] < AGAIN_S:
        # A program that follows .ctx/events has always one there.
        return Check(name, _machine.OK, f"{count} at the daemon, none of them for long")
    longest = "" if told is None else f", the longest for {told['longest_s']:.0f} s"
    return Check(
        name,
        WARN,
        f"{count} wait for the daemon{longest}",
        "`ps -eo pid,wchan:24,args | grep request_wait` shows whose; see the daemon's log; "
        f"`ctx umount --force {mount.point}`, or echo 1 > {connection}/abort, ends them and the "
        "mount",
    )


def _waiting(machine: Machine, connection: str) -> int | None:
    """How many requests have no answer yet; None where that cannot be read."""
    text = machine.read(f"{connection.lstrip('/')}/waiting")
    return int(text) if text is not None and text.isdigit() else None


def channel_check(point: str, stats: dict[str, Any]) -> Check:
    """How a mount speaks to the kernel, and why so."""
    why = stats["channel_why"]
    if stats["passthrough"]:
        return Check(
            f"channel {point}",
            _machine.OK,
            f"{stats['channel']} ({why}); the kernel reads sealed hot blocks itself",
        )
    return Check(
        f"channel {point}",
        _machine.OK,
        f"{stats['channel']} ({why}); all bytes pass through the daemon",
        "root on Linux 6.9 or later, with --channel auto or direct, needs that no more",
    )


def _silent(name: str, mount: _mounts.Mounted, connection: str) -> Check:
    """Why a mount gave no statistics."""
    told = probe(mount.point)
    if told is None:
        return Check(
            name,
            FAIL,
            "does not answer: its daemon hangs",
            f"`ctx umount --force {mount.point}`, or echo 1 > {connection}/abort",
        )
    if "not connected" in told:
        return Check(
            name,
            FAIL,
            "stale: its daemon is gone",
            f"`ctx umount {mount.point}`, then `ctx mount` again",
        )
    if "ermission" in told:
        return Check(name, WARN, "not yours to see", "mounted with allow_other it would be")
    return Check(name, FAIL, f"gives no statistics: {told or 'they are unreadable'}", "restart it")


def probe(point: str) -> str | None:
    """What `stat` says of a mount's statistics: empty if all is well, None if nothing in time.

    Another process asks, since a call into a hung mount ends only with its process.
    """
    try:
        done = subprocess.run(
            ["stat", "--", Mount(point).control("stats")],
            capture_output=True,
            timeout=PROBE_S,
            env={"LC_ALL": "C", "PATH": "/usr/bin:/bin"},
        )
    except (subprocess.TimeoutExpired, OSError):
        return None
    lines = done.stderr.decode("utf-8", "replace").strip()
    return escape(lines.rpartition(": ")[2])


def device_checks(tiers: dict[str, Any]) -> Iterator[Check]:
    """One line a device of the cold tier."""
    for device in tiers.get("cold", {}).get("devices", ()):
        name = f"device {device['path']}"
        if device["state"] == "lost":
            yield Check(name, FAIL, "is gone", "replace the drive, then restart the daemon")
        elif device["state"] != "ok":
            yield Check(
                name,
                WARN,
                f"{device['state']}: {device['errors']} errors",
                "look at the kernel's log (dmesg) and the drive's health (nvme smart-log)",
            )
        elif device.get("engine_why"):
            yield Check(
                name, WARN, f"ok, with {device['engine']}", f"because {device['engine_why']}"
            )
        else:
            yield Check(name, _machine.OK, f"ok, with {device['engine']}")


def _tell(checks: Sequence[Check], *, as_json: bool) -> None:
    if as_json:
        print_json([dataclasses.asdict(check) for check in checks])
        return
    width = max(len(check.name) for check in checks)
    for check in checks:
        line = f"{check.state:<4}  {escape(check.name):<{width}}  {check.text}"
        if is_terminal():
            from rich.text import Text

            text = Text(line)
            text.stylize(STYLES.get(check.state, ""), 0, len(check.state))
            console().print(text, soft_wrap=True)
        else:
            print(line)
        if check.remedy:
            print(f"{'':{6 + width}}  → {check.remedy}")
