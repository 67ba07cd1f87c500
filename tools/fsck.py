"""`ctx fsck`: check the devices of a cold tier that is not mounted, and mend them if asked."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ctxfs.errors import CtxfsError

from ._cli import Subparsers, add_command
from ._common import FAILED, OK, USAGE, ToolError
from ._output import escape, print_json, progress, short_size, waiting

if TYPE_CHECKING:
    from ctxfs.codec.keyring import KeyRing
    from ctxfs.device.threads import ThreadEngine
    from ctxfs.tiers.cold_check import Checked
    from ctxfs.tiers.cold_faults import DeviceReport, Fault

T = TypeVar("T")

# A device that is damaged all over has as many faults as blocks: more than these are counted only.
TOLD_MAX = 10_000


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    parser = add_command(
        subparsers,
        "fsck",
        "check devices of a cold tier that is not mounted",
        run,
        options=("--json",),
    )
    parser.add_argument(
        "--content", action="store_true", help="also compare every block with its digest"
    )
    keys = parser.add_mutually_exclusive_group()
    keys.add_argument("--key-file", metavar="FILE", help="keys of encrypted blocks, for --content")
    keys.add_argument("--keyring", metavar="NAME", help="the same, from the kernel's keyring")
    parser.add_argument(
        "--repair", action="store_true", help="put right what was found, after asking"
    )
    parser.add_argument("--yes", action="store_true", help="with --repair: do not ask")
    parser.add_argument(
        "devices", nargs="+", metavar="DEVICE", help="a device or file; all of a mount together"
    )
    return parser


def run(args: argparse.Namespace) -> int:
    if args.repair and not args.yes and (args.json or not sys.stdin.isatty()):
        raise ToolError("nobody can be asked", "say --yes to --repair", exit_code=USAGE)
    try:
        return _run(args)
    except CtxfsError as error:
        raise ToolError(str(error), exit_code=error.exit_code) from error


def _run(args: argparse.Namespace) -> int:
    from ctxfs.device.reading import opened

    with contextlib.ExitStack() as stack:
        engines = [
            (name, stack.enter_context(opened(Path(name), writable=args.repair)))
            for name in args.devices
        ]
        keys = _keys(args)
        faults = Faults()
        checked = _check(args, engines, keys, faults)
        if not args.repair:
            _print(args, checked, faults)
            return OK if checked.is_good else FAILED
        if not args.json:
            _print(args, checked, faults)
        if not _mend(args, checked):
            return FAILED
        faults = Faults()
        checked = _check(args, engines, keys, faults)
        _print(args, checked, faults)
        return OK if checked.is_good else FAILED


class Faults:
    """What was told so far."""

    def __init__(self) -> None:
        self.told: list[Fault] = []
        self.left_out = 0

    def add(self, fault: Fault) -> None:
        """Keep it, or count it where there are too many."""
        if len(self.told) < TOLD_MAX:
            self.told.append(fault)
        else:
            self.left_out += 1


def _keys(args: argparse.Namespace) -> KeyRing | None:
    if args.key_file is None and args.keyring is None:
        return None
    from ctxfs.codec.keyring import KeyRing
    from ctxfs.device.keys import KEYRING_PREFIX, read_keys

    source = args.key_file if args.keyring is None else f"{KEYRING_PREFIX}{args.keyring}"
    return KeyRing.parse(read_keys(source), os.urandom, source)


def _check(
    args: argparse.Namespace,
    engines: Sequence[tuple[str, ThreadEngine]],
    keys: KeyRing | None,
    faults: Faults,
) -> Checked:
    from ctxfs.tiers.cold_check import check

    bar = partial(progress, sizes=True)
    return _in_loop(partial(check, engines, faults.add, bar, content=args.content, keys=keys))


def _mend(args: argparse.Namespace, checked: Checked) -> bool:
    """Say what is done, ask, do it. False where the answer is no."""
    from ctxfs.tiers.cold_mend import mend, plan

    steps = plan(checked)
    if not args.json:
        print("To mend it:")
        for step in steps:
            print(f"  {escape(step)}")
    if not args.yes and input("Go on? [y/N] ").strip().lower() not in ("y", "yes"):
        return False
    with waiting("mending"):
        recovered = _in_loop(partial(mend, checked))
    if not args.json:
        print(f"Mended: {len(recovered.columns)} blocks are there.")
    return True


def _in_loop(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run `work` to its end; Ctrl-C ends it as it ends everything else."""
    import trio

    try:
        return trio.run(work)
    except BaseExceptionGroup as group:
        if group.split(KeyboardInterrupt)[1] is None:
            raise KeyboardInterrupt from None
        raise


# -- how it looks


def _print(args: argparse.Namespace, checked: Checked, faults: Faults) -> None:
    if args.json:
        print_json(
            {
                "ok": checked.is_good,
                "devices": [_report_row(each) for each in checked.reports],
                "faults": [_fault_row(each) for each in faults.told],
                "faults_left_out": faults.left_out,
            }
        )
        return
    for fault in faults.told:
        print(_fault_line(fault))
    if faults.left_out:
        print(f"and {faults.left_out} more")
    for report in checked.reports:
        for line in _report_lines(report):
            print(line)


def _fault_row(fault: Fault) -> dict[str, Any]:
    return {
        "device": fault.path,
        "offset_bytes": fault.offset,
        "kind": str(fault.kind),
        "expected": fault.expected,
        "what": fault.what,
        "then": fault.consequence,
        "key": None if fault.key is None else os.fsdecode(fault.key),
        "generation": fault.generation,
    }


def _fault_line(fault: Fault) -> str:
    where = fault.path if fault.offset is None else f"{fault.path} at {fault.offset}"
    of_block = ""
    if fault.key is not None:
        of_block = f" (key {escape(os.fsdecode(fault.key))}, generation {fault.generation})"
    elif fault.generation is not None:
        of_block = f" (generation {fault.generation})"
    mark = ", as after a crash" if fault.expected else ""
    return f"{escape(where)}: {fault.kind}{mark}: {fault.what}{of_block}; {fault.consequence}"


def _report_row(report: DeviceReport) -> dict[str, Any]:
    row = {name: getattr(report, name) for name in type(report).__slots__}
    row["device"] = row.pop("path")
    for name in ("faults", "expected"):
        row[name] = {str(kind): count for kind, count in row[name].items()}
    return {"device": row.pop("device"), "ok": report.is_good, **row}


def _report_lines(report: DeviceReport) -> list[str]:
    state = "closed cleanly" if report.clean else "not closed cleanly"
    lines = [
        f"{escape(report.path)}: {state}; {report.segments} segments, {report.free_segments} free, "
        f"{report.table_segments} of tables; {report.records} records",
        f"  {report.blocks} blocks of {short_size(report.content_bytes)}: "
        f"{short_size(report.live_bytes)} live, {short_size(report.dead_bytes)} dead, "
        f"room for {short_size(report.room_bytes)} of {short_size(report.capacity_bytes)}",
    ]
    if report.aliases:
        saved = short_size(report.saved_bytes)
        lines.append(f"  {report.aliases} blocks share the content of another: {saved} saved")
    if report.blocks_read or report.undecoded:
        unread = f", {report.undecoded} not readable without their keys" if report.undecoded else ""
        lines.append(f"  contents of {report.blocks_read} blocks compared{unread}")
    if report.dead_corrupt:
        lines.append(f"  {report.dead_corrupt} records with bad data that nothing needs any more")
    expected = ", ".join(f"{kind} {count}" for kind, count in report.expected.items())
    if expected:
        lines.append(f"  left by a crash, no fault: {expected}")
    faults = ", ".join(f"{kind} {count}" for kind, count in report.faults.items())
    lines.append(f"  faults: {faults}" if faults else "  good")
    return lines
