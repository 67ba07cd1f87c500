"""`ctx tier`: move blocks to a tier and keep them there, or show where they are."""

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
    read_story,
    set_attribute,
)
from ._output import Table, escape, print_json, progress

PLACEMENTS = ("auto", "hot", "warm", "cold")


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    parser = add_command(
        subparsers, "tier", "move blocks to a tier and keep them there, or show where they are", run
    )
    parser.usage = "ctx tier [-h] [--mount PATH] [--json] [auto|hot|warm|cold] KEY..."
    add_keys(parser)
    return parser


def split(words: list[str]) -> tuple[str | None, list[str]]:
    """The placement asked for, if any, and the blocks. A single word is always a block."""
    if len(words) > 1 and words[0] in PLACEMENTS:
        return words[0], words[1:]
    return None, words


def run(args: argparse.Namespace) -> int:
    placement, words = split(args.keys)
    mount = open_mount(args, words)
    tally = Tally()
    if words[0] in PLACEMENTS and len(words) == 1 and not mount.has(words[0]):
        raise ToolError("which blocks?", "name them after it", subject=words[0], exit_code=USAGE)
    if placement is None:
        rows = for_each(mount, words, lambda key: _show(mount, key), tally)
        if not args.json:
            _print(rows)
    else:
        with progress(f"to {placement}", len(words)) as advance:

            def move(key: str) -> dict[str, Any]:
                try:
                    set_attribute(mount, key, xattrs.TIER, placement)
                finally:
                    advance(1)
                return {"placement": placement}

            rows = for_each(mount, words, move, tally)
    if args.json:
        print_json(rows)
    return tally.exit_code


def _show(mount: Mount, key: str) -> dict[str, Any]:
    story = read_story(mount, key)
    return {name: story[name] for name in ("tier", "placement", "copies")}


def _print(rows: list[dict[str, Any]]) -> None:
    table = Table(("TIER", "PLACEMENT", "COPIES", "KEY"))
    table.rows = [
        (row["tier"] or "-", row["placement"], ",".join(row["copies"]) or "-", escape(row["key"]))
        for row in rows
        if row["ok"]
    ]
    if table.rows:
        table.print()
