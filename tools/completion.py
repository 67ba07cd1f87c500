"""`ctx completion`: what a shell needs to complete commands, options and keys."""

import argparse
import sys

from ._cli import Subparsers, add_command
from ._common import (
    OK,
)

SHELLS = ("bash", "zsh", "fish")


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    parser = add_command(
        subparsers, "completion", "print what a shell needs to complete `ctx`", run, options=()
    )
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help="bash, zsh or fish")
    return parser


def run(args: argparse.Namespace) -> int:
    from argcomplete.shell_integration import shellcode

    sys.stdout.write(shellcode(["ctx"], shell=args.shell) + "\n")
    return OK
