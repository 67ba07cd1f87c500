"""`ctx`: one command to see and steer the blocks below a ctxfs mount."""

import argparse
import contextlib
import errno
import os
import sys
from collections.abc import Sequence

import ctxfs

from . import (
    completion,
    device,
    df,
    doctor,
    dump,
    events,
    fsck,
    ls,
    mount,
    peers,
    pin,
    prefetch,
    rm,
    stat,
    tier,
    top,
    ttl,
    umount,
    unpin,
    verify,
)
from ._cli import Command
from ._common import FAILED, INTERRUPTED, OK, PIPE_CLOSED, USAGE, ToolError
from ._output import OutputFailed, guard_output

# In the order in which `ctx --help` tells them: look, steer, care, run.
COMMANDS = (
    ls, stat, df, top, events,
    tier, ttl, pin, unpin, prefetch, rm,
    verify, device, peers, doctor, fsck, dump,
    mount, umount, completion,
)  # fmt: skip


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top_parser = argparse.ArgumentParser(
        prog="ctx",
        description="See and steer the blocks below a ctxfs mount.",
        epilog="Each command has a page: ctx-ls(1), … . The ideas are in ctxfs(7).",
        allow_abbrev=False,
    )
    top_parser.add_argument("--version", action="version", version=f"ctx {ctxfs.__version__}")
    top_parser.add_argument("--mount", metavar="PATH", default=None, help="the ctxfs mount to use")
    top_parser.add_argument("--json", action="store_true", help="answer in JSON")
    subparsers = top_parser.add_subparsers(
        title="commands", metavar="COMMAND", dest="command", parser_class=Command
    )
    for module in COMMANDS:
        module.add_parser(subparsers)
    return top_parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code (table in ctx(1))."""
    command_line = parser()
    if "_ARGCOMPLETE" in os.environ:
        import argcomplete

        argcomplete.autocomplete(command_line)
    args = command_line.parse_args(argv)
    if args.command is None:
        command_line.print_help(sys.stderr)
        return USAGE
    guard_output()
    with contextlib.suppress(AttributeError):
        sys.stderr.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    return _run(args)


def _run(args: argparse.Namespace) -> int:
    try:
        code: int = args.run(args)
        sys.stdout.flush()
    except ToolError as error:
        print(f"ctx: {error.line}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except OutputFailed as failed:
        # Python flushes again at exit: let that go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if failed.error.errno == errno.EPIPE:
            return PIPE_CLOSED  # the reader has what it wanted
        print(f"ctx: standard output: {failed.error.strerror}", file=sys.stderr)
        return FAILED
    return code or OK


if __name__ == "__main__":
    sys.exit(main())
