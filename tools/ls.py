"""`ctx ls`: the blocks beneath a directory, with where they are and how long they stay."""

import argparse
import errno
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ._cli import Subparsers, add_command, add_keys
from ._common import (
    Entry,
    Mount,
    Tally,
    ToolError,
    children,
    failure,
    open_mount,
    read_story,
    walk,
)
from ._output import escape, is_terminal, painter, short_duration, short_size, stream_json

TIERS = ("hot", "warm", "cold", "remote")  # fastest first
SORTS = ("name", "size", "ttl", "idle", "tier", "created", "hits")
LONG_HEADER = ("TIER", "FLAGS", "SIZE", "TTL", "IDLE", "HITS", "KEY")
LONG_FORMAT = "{:<6}  {:<5}  {:>9}  {:>7}  {:>7}  {:>6}  {}"

Row = dict[str, Any]


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    parser = add_command(
        subparsers, "ls", "list blocks, with their tier, size, time to live and idle time", run
    )
    parser.add_argument("-l", "--long", action="store_true", help="one line a block, with columns")
    parser.add_argument("-a", "--all", action="store_true", help="also names that begin with a dot")
    parser.add_argument(
        "-R", "--recursive", action="store_true", help="also what lies in directories"
    )
    parser.add_argument(
        "--sort", metavar="ORDER", choices=SORTS, default="name", help=f"by {', '.join(SORTS)}"
    )
    parser.add_argument("-r", "--reverse", action="store_true", help="the other way round")
    parser.add_argument(
        "--tier",
        metavar="TIER",
        choices=TIERS,
        help=f"only blocks whose fastest copy is in {', '.join(TIERS)}",
    )
    add_keys(parser, nargs="*", metavar="PATH")
    return parser


def run(args: argparse.Namespace) -> int:
    mount = open_mount(args, args.keys)
    tally = Tally()
    rows = _select(mount, args, _entries(mount, args, tally), tally)
    if args.json:
        stream_json(rows)
    elif args.long:
        _print_long(rows)
    else:
        _print_names(rows)
    return tally.exit_code


def _entries(mount: Mount, args: argparse.Namespace, tally: Tally) -> Iterator[Entry]:
    """What the words name: a block itself, a directory's content."""
    inside = os.getcwd() if not args.keys else ""
    for word in args.keys or ["." if inside.startswith(mount.point + "/") else mount.point]:
        try:
            key = mount.key(word)
            if not os.path.isdir(mount.path(key)):
                os.lstat(mount.path(key))
                yield Entry(key, False)
            elif args.recursive:
                children(mount, key)  # so that a directory that may not be read is told
                yield from walk(mount, key, hidden=args.all)
            else:
                yield from children(mount, key, hidden=args.all)
        except ToolError as error:
            tally.fail(error)
        except OSError as error:
            tally.fail(failure(word, error))


def _select(
    mount: Mount, args: argparse.Namespace, entries: Iterable[Entry], tally: Tally
) -> Iterable[Row]:
    """Rows in the order asked for. By name they come as they are found, so long ones start at
    once; any other order has to see all of them first.
    """
    wants_story = args.long or args.json or args.tier or args.sort != "name"
    rows = _rows(mount, entries, tally, wants_story=wants_story)
    if args.tier:
        rows = (row for row in rows if row.get("tier") == args.tier)
    if args.sort == "name" and not args.reverse:
        return rows
    return sort_rows(list(rows), args.sort, reverse=args.reverse)


def _rows(
    mount: Mount, entries: Iterable[Entry], tally: Tally, *, wants_story: bool
) -> Iterator[Row]:
    for entry in entries:
        row: Row = {"key": entry.key, "type": "directory" if entry.is_directory else "block"}
        if wants_story and not entry.is_directory:
            try:
                row |= read_story(mount, entry.key)
            except OSError as error:
                # A block that expired since its name was read is no failure, and no block.
                if error.errno != errno.ENOENT:
                    tally.fail(failure(entry.key, error))
                continue
        yield row


def sort_rows(rows: list[Row], by: str, *, reverse: bool = False) -> list[Row]:
    """Rows by one of `SORTS`, equal ones by name; directories keep to the front.

    Each order begins with what one looks for: the largest, the first to expire, the longest
    idle, the fastest tier, the newest, the most used.
    """
    orders: dict[str, Callable[[Row], Any]] = {
        "name": lambda row: (),
        "size": lambda row: -row["size_bytes"],
        "ttl": lambda row: math.inf if row["ttl_s"] is None else row["ttl_s"],
        "idle": lambda row: -row["idle_s"],
        "tier": lambda row: TIERS.index(row["tier"]) if row["tier"] in TIERS else len(TIERS),
        "hits": lambda row: -row["hits"],
    }
    blocks = sorted(
        (row for row in rows if row["type"] == "block"), key=lambda row: os.fsencode(row["key"])
    )
    if by == "created":  # text: only turning it round sorts it downwards
        blocks.sort(key=lambda row: str(row["created"]), reverse=True)
    else:
        blocks.sort(key=orders[by])
    if by == "name":
        return sorted(rows, key=lambda row: os.fsencode(row["key"]), reverse=reverse)
    directories = [row for row in rows if row["type"] == "directory"]
    return directories + (blocks[::-1] if reverse else blocks)


def _name(row: Row) -> str:
    return escape(row["key"]) + ("/" if row["type"] == "directory" else "")


def flags(row: Row) -> str:
    """Three places: `w` still written, `p` pinned, `f` kept in a tier until `auto` is written."""
    return (
        ("w" if row["state"] == "writing" else "-")
        + ("p" if str(row["pin"]) != "0" else "-")
        + ("f" if row.get("placement", "auto") != "auto" else "-")
    )


def long_line(row: Row) -> str:
    """One line of `ls -l`: fixed columns, the key last."""
    if row["type"] == "directory":
        return LONG_FORMAT.format("-", "-", "-", "-", "-", "-", _name(row))
    return LONG_FORMAT.format(
        row["tier"] or "-",
        flags(row),
        short_size(row["size_bytes"]),
        short_duration(row["ttl_s"], absent="none"),
        short_duration(row["idle_s"]),
        row["hits"],
        _name(row),
    )


def _print_long(rows: Iterable[Row]) -> None:
    paint = painter()
    if is_terminal():
        print(LONG_FORMAT.format(*LONG_HEADER))
    for row in rows:
        line = long_line(row)
        tier = row.get("tier") or "-"
        print(paint(line[:6], tier) + line[6:])


def _print_names(rows: Iterable[Row]) -> None:
    if not is_terminal():
        sys.stdout.writelines(_name(row) + "\n" for row in rows)
        return
    names = [_name(row) for row in rows]
    sys.stdout.writelines(
        line + "\n" for line in in_columns(names, shutil.get_terminal_size().columns)
    )


def in_columns(names: Sequence[str], width: int) -> list[str]:
    """`names` downwards in as many equal columns as fit into `width` characters."""
    if not names:
        return []
    cell = max(len(name) for name in names) + 2
    lines = math.ceil(len(names) / max(1, width // cell))
    return ["".join(name.ljust(cell) for name in names[i::lines]).rstrip() for i in range(lines)]
