"""What the parsers of all sub-commands share."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from ._common import ToolError, open_mount

Subparsers = Any  # argparse keeps the type of what add_subparsers() returns to itself


# In front of a word that stands after `--`: no word of a command line holds this character.
OPERAND = "\0"


def plain(word: str) -> str:
    """A word as it was typed."""
    return word.removeprefix(OPERAND)


class Command(argparse.ArgumentParser):
    """A sub-command's parser. Takes options between operands too, as people type them.

    What stands after `--` is never an option. argparse forgets where that was when it parses a
    second time, as it does for options between operands; so those words are marked before.
    """

    _intermixing = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register("type", None, plain)  # of all words that nothing else converts

    def parse_known_args(  # type: ignore[override]  # argparse has overloads for the namespace
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        # What takes all the rest as it stands cannot have options in between.
        takes_rest = any(action.nargs == argparse.REMAINDER for action in self._actions)
        if self._intermixing or takes_rest:
            return super().parse_known_args(args, namespace)
        words = list(sys.argv[1:] if args is None else args)
        if "--" in words:
            end = words.index("--")
            words[end:] = [OPERAND + word for word in words[end + 1 :]]
        self._intermixing = True  # the intermixed way comes back here, twice
        try:
            found, unknown = self.parse_known_intermixed_args(words, namespace)
        finally:
            self._intermixing = False
        return found, [plain(word) for word in unknown]


def add_command(
    subparsers: Subparsers,
    name: str,
    summary: str,
    run: Callable[[argparse.Namespace], int],
    *,
    options: Sequence[str] = ("--mount", "--json"),
) -> argparse.ArgumentParser:
    """A sub-command's parser, with those of the common options that mean something to it."""
    command: argparse.ArgumentParser = subparsers.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=f"More in ctx-{name}(1).",
        allow_abbrev=False,
    )
    # SUPPRESS: what is not given here must not undo what stands before the sub-command's name.
    if "--mount" in options:
        command.add_argument(
            "--mount", metavar="PATH", default=argparse.SUPPRESS, help="the ctxfs mount to use"
        )
    if "--json" in options:
        command.add_argument(
            "--json", action="store_true", default=argparse.SUPPRESS, help="answer in JSON"
        )
    command.set_defaults(run=run)
    return command


def add_keys(parser: argparse.ArgumentParser, *, nargs: str = "+", metavar: str = "KEY") -> None:
    """The blocks to work on, completed from the mount."""
    action = parser.add_argument(
        "keys", nargs=nargs, metavar=metavar, help="a key, or a path below the mount"
    )
    action.completer = complete_keys  # type: ignore[attr-defined]  # argcomplete's way


def complete_keys(prefix: str, parsed_args: argparse.Namespace, **_unused: object) -> list[str]:
    """Keys below the mount that begin with `prefix`, one level deep, at most 200."""
    try:
        mount = open_mount(parsed_args, ())
        parent, _, start = prefix.rpartition("/")
        absolute = prefix.startswith(("/", "./", "../"))
        found: list[str] = []
        with os.scandir((parent or "/") if absolute else mount.path(parent)) as entries:
            for entry in entries:
                if entry.name.startswith(start) and len(found) < 200:
                    name = f"{parent}/{entry.name}" if "/" in prefix else entry.name
                    found.append(name + "/" if entry.is_dir() else name)
    except (OSError, ToolError):
        return []  # completion must never put words on the user's line
    return found
