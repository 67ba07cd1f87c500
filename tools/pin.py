"""`ctx pin`: keep blocks from being evicted."""

import argparse
from typing import Any

from ctxfs import xattrs

from ._cli import Subparsers, add_command, add_keys
from ._common import (
    USAGE,
    Mount,
    Tally,
    ToolError,
    for_each,
    open_mount,
    set_attribute,
)
from ._output import print_json
from .ttl import is_duration

FOREVER = "1"
NOT = "0"


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    parser = add_command(subparsers, "pin", "keep blocks from being evicted", run)
    parser.add_argument(
        "--for", dest="duration", metavar="DURATION", help="until this time is over: 90s, 15m, 72h"
    )
    add_keys(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    return write_pin(args, pin_value(args.duration))


def pin_value(duration: str | None) -> str:
    """What to write for `--for`. Raises ToolError."""
    if duration is None:
        return FOREVER
    if duration == "none" or not is_duration(duration):
        raise ToolError("not a time", "90s, 15m, 72h or 30d", subject=duration, exit_code=USAGE)
    # A bare 1 or 0 would mean a pin without end, or none.
    return duration + "s" if duration[-1].isdigit() else duration


def write_pin(args: argparse.Namespace, value: str) -> int:
    """Write one value to every block's pin; returns the exit code."""
    mount: Mount = open_mount(args, args.keys)
    tally = Tally()

    def act(key: str) -> dict[str, Any]:
        set_attribute(mount, key, xattrs.PIN, value)
        return {"pin": value}

    rows = for_each(mount, args.keys, act, tally)
    if args.json:
        print_json(rows)
    return tally.exit_code
