"""`ctx prefetch`: start bringing blocks to the hot tier."""

import argparse
from typing import Any

from ctxfs import xattrs

from ._cli import Subparsers, add_command, add_keys
from ._common import (
    Tally,
    for_each,
    open_mount,
    set_attribute,
)
from ._output import print_json


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    parser = add_command(subparsers, "prefetch", "start bringing blocks to the hot tier", run)
    parser.add_argument("--chain", action="store_true", help="their descendants too")
    add_keys(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    mount = open_mount(args, args.keys)
    tally = Tally()
    value = "chain" if args.chain else "1"

    def act(key: str) -> dict[str, Any]:
        set_attribute(mount, key, xattrs.PREFETCH, value)
        return {"chain": args.chain}

    rows = for_each(mount, args.keys, act, tally)
    if args.json:
        print_json(rows)
    return tally.exit_code
