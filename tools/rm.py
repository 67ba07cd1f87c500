"""`ctx rm`: remove blocks, by key."""

import argparse
import contextlib
import errno
import os
import stat
from typing import Any

from ._cli import Subparsers, add_command, add_keys
from ._common import (
    CONTROL,
    USAGE,
    Mount,
    Tally,
    ToolError,
    failure,
    for_each,
    open_mount,
    walk,
)
from ._output import print_json, waiting


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    parser = add_command(subparsers, "rm", "remove blocks from all tiers", run)
    parser.add_argument(
        "-r", "--recursive", action="store_true", help="directories too, with all beneath them"
    )
    parser.add_argument("-f", "--force", action="store_true", help="say nothing of missing blocks")
    add_keys(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    mount = open_mount(args, args.keys)
    tally = Tally()

    def act(key: str) -> dict[str, Any]:
        try:
            return {"removed": remove(mount, key, tally, recursive=args.recursive)}
        except FileNotFoundError:
            if not args.force:
                raise
            return {"removed": 0}

    with waiting("removing"):
        rows = for_each(mount, args.keys, act, tally)
    if args.json:
        print_json(rows)
    return tally.exit_code


def remove(mount: Mount, key: str, tally: Tally, *, recursive: bool) -> int:
    """Remove a block, or a directory if `recursive`; returns how many blocks went.

    Raises OSError and ToolError. Failures beneath a directory go to `tally`, and the rest goes on.
    """
    path = mount.path(key)
    if key.split("/")[0] == CONTROL:
        raise ToolError("belongs to the daemon and stays", subject=key)
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        os.unlink(path)
        return 1
    if not key:
        raise ToolError(
            "the mount itself stays", "name what is to go", subject=mount.point, exit_code=USAGE
        )
    if not recursive:
        raise ToolError("is a directory", "-r removes it with all beneath it", subject=key)
    removed, failed = _empty(mount, key, tally)
    if not failed:
        # A directory that was only the prefix of its keys is gone with the last of them.
        with contextlib.suppress(FileNotFoundError):
            os.rmdir(path)
    return removed


def _empty(mount: Mount, key: str, tally: Tally) -> tuple[int, int]:
    """Remove all beneath `key`; returns how many blocks went and how many names could not go."""
    os.scandir(mount.path(key)).close()  # a directory that may not be read is told
    removed = failed = 0
    # Deepest first: a walk names each directory before what it holds.
    for entry in reversed(list(walk(mount, key))):
        try:
            if entry.is_directory:
                os.rmdir(mount.path(entry.key))
            else:
                os.unlink(mount.path(entry.key))
                removed += 1
        except FileNotFoundError:
            continue  # expired, or removed by somebody else: gone is gone
        except OSError as error:
            failed += 1
            # What is left in a directory has been told already.
            if not (entry.is_directory and failed > 1 and error.errno == errno.ENOTEMPTY):
                tally.fail(failure(entry.key, error))
    return removed, failed
