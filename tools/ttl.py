"""`ctx ttl`: set or show how long blocks live."""

import argparse
import errno
import os
from typing import Any

from ctxfs import xattrs
from ctxfs.errors import BadValue
from ctxfs.units import parse_duration_ns

from ._cli import Subparsers, add_command, add_keys
from ._common import (
    USAGE,
    Mount,
    Tally,
    ToolError,
    for_each,
    get_attribute,
    open_mount,
    set_attribute,
)
from ._output import Table, escape, print_json, short_duration

ACCEPTED = "90, 90s, 15m, 72h, 30d or none"


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    parser = add_command(
        subparsers, "ttl", "set or show the time to live of blocks, or a directory's default", run
    )
    parser.usage = "ctx ttl [-h] [--mount PATH] [--json] [VALUE|none] KEY..."
    add_keys(parser)
    return parser


def is_duration(word: str) -> bool:
    """True for what `user.ctx.ttl` takes."""
    try:
        parse_duration_ns(word)
    except BadValue:
        return False
    return True


def split(words: list[str]) -> tuple[str | None, list[str]]:
    """The lifetime asked for, if any, and the blocks. A single word is always a block."""
    if len(words) > 1 and is_duration(words[0]):
        return words[0], words[1:]
    return None, words


def run(args: argparse.Namespace) -> int:
    value, words = split(args.keys)
    mount = open_mount(args, words)
    if value is None:
        _refuse_misspelt(mount, words)
    tally = Tally()

    def act(key: str) -> dict[str, Any]:
        if value is None:
            return _show(mount, key)
        set_attribute(mount, key, xattrs.TTL, value)
        return {"ttl": value}

    rows = for_each(mount, words, act, tally)
    if args.json:
        print_json(rows)
    elif value is None:
        _print(rows)
    return tally.exit_code


def _refuse_misspelt(mount: Mount, words: list[str]) -> None:
    """A lifetime without a block, or one like `15x`, is a mistake unless a block is named so."""
    first = words[0]
    if len(words) == 1 and is_duration(first) and not mount.has(first):
        raise ToolError("which blocks?", "name them after it", subject=first, exit_code=USAGE)
    if len(words) > 1 and first[:1].isdigit() and not mount.has(first):
        raise ToolError("neither a time nor a block", ACCEPTED, subject=first, exit_code=USAGE)


def _show(mount: Mount, key: str) -> dict[str, Any]:
    try:
        value = get_attribute(mount, key, xattrs.TTL)
    except OSError as error:
        # A directory has a default only where somebody set one: the one above it holds.
        if error.errno != errno.ENODATA or not os.path.isdir(mount.path(key)):
            raise
        return {"ttl_s": None, "inherited": True}
    return {"ttl_s": None if value == "none" else float(value), "inherited": False}


def _print(rows: list[dict[str, Any]]) -> None:
    table = Table((">TTL", "KEY"))
    table.rows = [
        (short_duration(row["ttl_s"], absent=_absent(row)), escape(row["key"] or "/"))
        for row in rows
        if row["ok"]
    ]
    if table.rows:
        table.print()


def _absent(row: dict[str, Any]) -> str:
    return "inherited" if row["inherited"] else "none"
