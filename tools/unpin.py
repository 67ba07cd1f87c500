"""`ctx unpin`: let blocks be evicted again."""

import argparse

from ._cli import Subparsers, add_command, add_keys
from .pin import NOT, write_pin


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    parser = add_command(subparsers, "unpin", "let blocks be evicted again", run)
    add_keys(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    return write_pin(args, NOT)
