"""`ctx mount`: start the daemon and wait until the mount answers."""

import argparse
import os
import shutil
import subprocess
import sys

from ._cli import Subparsers, add_command
from ._common import (
    USAGE,
    Mount,
    ToolError,
)
from ._output import print_json, waiting

DAEMON = "ctx-mountd"


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    parser = add_command(
        subparsers,
        "mount",
        "start the daemon and wait until the mount answers",
        run,
        options=("--json",),
    )
    parser.usage = "ctx mount [-h] [--json] [CONFIG] MOUNTPOINT [OPTION...]"
    # Two positionals, since a lone REMAINDER would swallow the options before it too.
    parser.add_argument(
        "first", metavar="CONFIG|MOUNTPOINT", help="a configuration file, or where to mount"
    )
    parser.add_argument(
        "rest",
        metavar="OPTION",
        nargs=argparse.REMAINDER,
        help="where to mount, after a configuration file; then options of ctx-mountd(8)",
    )
    return parser


def daemon_command(words: list[str]) -> tuple[str, list[str]]:
    """The mount point, and the arguments for the daemon. Raises ToolError."""
    names = []
    for word in words[:2]:
        if word.startswith("-"):
            break
        names.append(word)
    *config, point = names
    options = words[len(names) :]
    stray = options[0] if options and not options[0].startswith("-") else None
    if stray is not None:
        raise ToolError(
            "not expected here", "CONFIG, MOUNTPOINT, then options", subject=stray, exit_code=USAGE
        )
    chosen = ["-c", config[0]] if config else []
    return point, ["--daemon", *chosen, *options, point]


def find_daemon() -> list[str]:
    """The daemon installed beside this very `ctx`, else the one in PATH. Raises ToolError."""
    beside = os.path.dirname(os.path.abspath(sys.argv[0]))
    for path in (beside, os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)):
        found = shutil.which(DAEMON, path=path)
        if found:
            return [found]
    raise ToolError("is not installed beside ctx, nor in PATH", subject=DAEMON)


def run(args: argparse.Namespace) -> int:
    point, arguments = daemon_command([args.first, *args.rest])
    # The daemon's own lines are the answer, and its errors carry their remedy. Under --json they
    # go to standard error, which leaves standard output to the document.
    with waiting("mounting"):
        done = subprocess.run(
            [*find_daemon(), *arguments], stdout=sys.stderr.fileno() if args.json else None
        )
    if done.returncode == 0 and args.json:
        mount = Mount(os.path.realpath(point))
        print_json({"mount": mount.point, "pid": mount.stats()["pid"]})
    return done.returncode if done.returncode >= 0 else 128 - done.returncode
