"""`mount.ctxfs`: what mount(8) runs for `mount -t ctxfs CONFIG MOUNTPOINT` and for fstab."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO

from ctxfs.errors import ConfigError
from mountd import cli
from mountd.options import parse_options

NAME = "mount.ctxfs"


def parser() -> cli.Parser:
    """The arguments that mount(8) gives to its helpers."""
    result = cli.Parser(
        prog=NAME,
        allow_abbrev=False,
        description="Mount ctxfs for mount(8). To start it by hand, ctx-mountd says more.",
    )
    add = result.add_argument
    add("config", metavar="CONFIG", help="configuration file, or none for the defaults")
    add("mountpoint", metavar="MOUNTPOINT", help="directory to mount on")
    add("-s", dest="sloppy", action="store_true", help="tolerate options that are not known")
    add("-f", dest="fake", action="store_true", help="check everything, mount nothing")
    add("-n", dest="no_mtab", action="store_true", help="ignored: the kernel keeps the table")
    add("-v", dest="verbose", action="store_true", help="say what is run, and what it answers")
    add(
        "-o",
        dest="options",
        metavar="OPTIONS",
        action="append",
        default=[],
        help="mount options, comma-separated",
    )
    return result


def daemon_arguments(arguments: argparse.Namespace) -> list[str]:
    """The same in the flags of `ctx-mountd`. Raises ConfigError for options not accepted."""
    flags = ["--check" if arguments.fake else "--daemon"]
    if arguments.config != "none":
        flags += ["-c", arguments.config]
    for override in parse_options(arguments.options, sloppy=arguments.sloppy):
        value = "" if override.value is True else f"={override.value}"
        flags += ["-o", f"{override.key}{value}"]
    return [*flags, "--", arguments.mountpoint]


def main(argv: Sequence[str] | None = None) -> int:
    """The console script. Returns the daemon's exit status, 0 once the mount answers."""
    arguments = parser().parse_args(argv)
    try:
        flags = daemon_arguments(arguments)
    except ConfigError as error:
        sys.stderr.writelines(f"{NAME}: {text}\n" for text in str(error).splitlines())
        return error.exit_code
    if arguments.verbose:
        sys.stdout.write(f"{NAME}: {shlex.join([cli.NAME, *flags])}\n")
        return cli.main(flags)
    with redirect_stdout(StringIO()):
        return cli.main(flags)


if __name__ == "__main__":
    sys.exit(main())
