"""`ctx verify`: have every copy of blocks read again and checked."""

import argparse
import errno
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from ctxfs import xattrs

from ._cli import Subparsers, add_command, add_keys
from ._common import (
    FAILED,
    USAGE,
    Mount,
    Tally,
    ToolError,
    failure,
    open_mount,
    read_story,
    set_attribute,
    walk,
)
from ._output import console, escape, is_terminal, print_json, progress, short_size

READ_BYTES = 8 << 20

# What came of a block.
GOOD = "good"
CORRUPT = "corrupt"
UNSEALED = "writing"  # nothing to check against yet
GONE = "gone"  # expired or removed since its name was read
UNCHECKED = "unchecked"  # could not be asked

Row = dict[str, Any]


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    parser = add_command(
        subparsers, "verify", "have every copy of blocks read again and checked", run
    )
    parser.add_argument("--all", action="store_true", help="every block below the mount")
    parser.add_argument(
        "--read", action="store_true", help="also read them through the mount and compare"
    )
    add_keys(parser, nargs="*")
    return parser


def run(args: argparse.Namespace) -> int:
    if bool(args.keys) == args.all:
        raise ToolError("name blocks, or say --all", exit_code=USAGE)
    mount = open_mount(args, args.keys)
    tally = Tally()
    work = list(_work(mount, args.keys or [mount.point], tally))
    rows = []
    total_bytes = sum(story["size_bytes"] for story in work)
    with progress("verifying", total_bytes, sizes=True) as advance:
        for story in work:
            rows.append(check(mount, story, tally, read=args.read))
            advance(story["size_bytes"])
    if args.json:
        print_json(rows)
    else:
        _print_summary(rows)
    if any(row["result"] == CORRUPT for row in rows):
        return FAILED
    return tally.exit_code


def _work(mount: Mount, words: Iterable[str], tally: Tally) -> Iterator[Row]:
    """Stories of all blocks that the words name, themselves or as what lies beneath."""
    for word in words:
        try:
            key = mount.key(word)
            if os.path.isdir(mount.path(key)):
                os.scandir(mount.path(key)).close()  # one that may not be read is told
                keys = (entry.key for entry in walk(mount, key) if not entry.is_directory)
                yield from _beneath(mount, keys, tally)
            else:
                yield read_story(mount, key)
        except ToolError as error:
            tally.fail(error)
        except OSError as error:
            tally.fail(failure(word, error))


def _beneath(mount: Mount, keys: Iterable[str], tally: Tally) -> Iterator[Row]:
    for key in keys:
        try:
            yield read_story(mount, key)
        except FileNotFoundError:
            continue  # gone since its name was read
        except OSError as error:
            tally.fail(failure(key, error))


def check(mount: Mount, story: Row, tally: Tally, *, read: bool) -> Row:
    """Check one block; a bad one is told at once. Returns its row for `--json`."""
    key: str = story["key"]
    row: Row = {"key": key, "size_bytes": story["size_bytes"], "result": GOOD}
    if story["state"] != "sealed":
        row["result"] = UNSEALED
        return row
    try:
        set_attribute(mount, key, xattrs.VERIFY, "1")
        if read:
            row["result"] = _read_through(mount, story, tally)
    except FileNotFoundError:
        row["result"] = GONE
    except OSError as error:
        if error.errno == errno.EIO:
            row["result"] = CORRUPT
            row["lives_on"] = os.path.lexists(mount.path(key))
            tally.fail(_bad_copy(key, lives_on=row["lives_on"]))
        else:
            row["result"] = UNCHECKED
            tally.fail(failure(key, error))
    return row


def _bad_copy(key: str, *, lives_on: bool) -> ToolError:
    if lives_on:
        return ToolError("a copy was bad and is dropped", "another one is good", subject=key)
    return ToolError(
        "its copy was bad and is dropped", "the block is gone: compute it again", subject=key
    )


def _read_through(mount: Mount, story: Row, tally: Tally) -> str:
    """Read a block as its users do and compare with its digest. Raises OSError."""
    import xxhash

    digest = xxhash.xxh3_128()
    with open(mount.path(story["key"]), "rb", buffering=0) as file:
        while piece := file.read(READ_BYTES):
            digest.update(piece)
    expected = str(story["digest"]).rpartition(":")[2]
    if digest.hexdigest() == expected.lower():
        return GOOD
    if read_story(mount, story["key"])["generation"] != story["generation"]:
        return GONE  # written anew meanwhile: other bytes, and no mistake
    tally.fail(
        ToolError(
            "the mount gave other bytes than its digest says",
            "report it, with `ctx stat` of the block",
            subject=story["key"],
        )
    )
    return CORRUPT


def _print_summary(rows: list[Row]) -> None:
    results = Counter(row["result"] for row in rows)
    size = sum(row["size_bytes"] for row in rows)
    parts = [f"{count} {result}" for result, count in sorted(results.items())]
    text = f"{len(rows)} blocks, {short_size(size)}: " + (", ".join(parts) or "nothing to check")
    if is_terminal():
        console().print(text, style="bold red" if results[CORRUPT] else "green")
    else:
        print(text)
    for row in rows:
        if row["result"] == UNSEALED:
            print(f"{escape(row['key'])}: still written, not checked")
