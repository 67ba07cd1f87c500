"""What every sub-command shares: the mount, keys, what is known of a block, and how to fail."""

import argparse
import errno
import json
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

from ctxfs import xattrs

from . import _mounts
from ._output import escape

P = ParamSpec("P")
T = TypeVar("T")

OK = 0
FAILED = 1
USAGE = 2
NOT_FOUND = 3
NO_ROOM = 4
TIER_TROUBLE = 5
INTERRUPTED = 130  # 128 + SIGINT, as shells count
PIPE_CLOSED = 141  # 128 + SIGPIPE

CONTROL = ".ctx"  # the daemon's own directory below the mount


class Answer(NamedTuple):
    """What an errno means to a person, and to a script."""

    exit_code: int
    what: str
    remedy: str


# The one place where errnos become words and exit codes; ctxfs.errors gives the daemon's side.
ANSWERS = {
    errno.ENOENT: Answer(NOT_FOUND, "no such block or directory", ""),
    errno.EINVAL: Answer(USAGE, "value not accepted", "see ctxfs(7), and the daemon's log"),
    errno.ENAMETOOLONG: Answer(USAGE, "name too long", "255 bytes between slashes, 4095 in all"),
    errno.ENOSPC: Answer(NO_ROOM, "no room in that tier", "unpin or remove blocks; see `ctx df`"),
    errno.EDQUOT: Answer(NO_ROOM, "over the owner's quota", "remove some of the owner's blocks"),
    errno.ETIMEDOUT: Answer(TIER_TROUBLE, "a tier did not answer in time", "see `ctx doctor`"),
    errno.EIO: Answer(TIER_TROUBLE, "the medium failed or a copy was bad", "see `ctx events`"),
    errno.ENOKEY: Answer(
        TIER_TROUBLE,
        "it is encrypted with a key that the daemon does not have",
        "give it that key again: codec.key_file in ctxfs.toml(5); the log names it",
    ),
    errno.EPROTONOSUPPORT: Answer(
        TIER_TROUBLE, "a later ctxfs stored it, in a way that this one cannot read", "upgrade ctxfs"
    ),
    errno.EACCES: Answer(FAILED, "permission denied", "its owner or root may"),
    errno.EPERM: Answer(
        FAILED, "not permitted", "its owner or root may; sealed bytes never change"
    ),
    errno.EISDIR: Answer(FAILED, "is a directory", "name the blocks beneath it"),
    errno.ENOTDIR: Answer(FAILED, "is a block, not a directory", ""),
    errno.ENOTEMPTY: Answer(FAILED, "directory not empty", "somebody is adding blocks; try again"),
    errno.EBUSY: Answer(FAILED, "in use", "try again when it is closed"),
    errno.ENODATA: Answer(FAILED, "not known to ctxfs", "is it below a ctxfs mount?"),
    errno.EOPNOTSUPP: Answer(FAILED, "not known to ctxfs", "is it below a ctxfs mount?"),
    errno.ENOTCONN: Answer(FAILED, "the daemon is gone", "`ctx umount`, then `ctx mount` again"),
    errno.ECONNABORTED: Answer(FAILED, "the mount was aborted", "`ctx umount`, then mount again"),
}


class ToolError(Exception):
    """A failure to tell in one line: what is wrong, and what to do about it."""

    def __init__(
        self, what: str, remedy: str = "", *, subject: str = "", exit_code: int = FAILED
    ) -> None:
        super().__init__(what)
        self.what = what
        self.remedy = remedy
        self.subject = subject
        self.exit_code = exit_code

    @property
    def line(self) -> str:
        """`SUBJECT: what (what to do)`, safe to print."""
        subject = f"{escape(self.subject)}: " if self.subject else ""
        return f"{subject}{self.what}" + (f" ({self.remedy})" if self.remedy else "")


def failure(subject: str, error: OSError) -> ToolError:
    """The words and the exit code for a system call that failed on `subject`."""
    answer = ANSWERS.get(error.errno or 0)
    if answer is None:
        return ToolError(error.strerror or str(error), subject=subject)
    return ToolError(answer.what, answer.remedy, subject=subject, exit_code=answer.exit_code)


@dataclass(slots=True)
class Tally:
    """Failures so far. One bad key never stops the rest."""

    codes: set[int] = field(default_factory=set)

    def fail(self, error: ToolError) -> None:
        """Tell it on standard error, and remember its exit code."""
        print(f"ctx: {error.line}", file=sys.stderr)
        self.codes.add(error.exit_code)

    @property
    def exit_code(self) -> int:
        """0 without failures, their code where all have the same, else 1."""
        if not self.codes:
            return OK
        return self.codes.copy().pop() if len(self.codes) == 1 else FAILED


# ---- mount and keys ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Mount:
    """Where the blocks are."""

    point: str  # absolute, no symbolic links

    def path(self, key: str) -> str:
        """The file of a key; the mount itself for the empty key."""
        return os.path.join(self.point, key) if key else self.point

    def control(self, name: str) -> str:
        """A file of the daemon's own directory."""
        return os.path.join(self.point, CONTROL, name)

    def key(self, word: str) -> str:
        """The key that `word` means; the empty key is the mount's root.

        A word that as a path lies below the mount is that path, if it is absolute, begins with
        `./` or `../`, or exists. Any other relative word is a key. Raises ToolError.
        """
        if not word:
            raise ToolError("an empty word is no key", exit_code=USAGE)
        is_path = word.startswith(("/", "./", "../")) or word in (".", "..")
        below = _mounts.below(self.point, word)
        if below is not None and (is_path or os.path.lexists(word)):
            return below
        if is_path:
            raise ToolError(f"not below {self.point}", subject=word, exit_code=USAGE)
        key = os.path.normpath(word)
        if key.startswith("../"):
            raise ToolError(f"not below {self.point}", subject=word, exit_code=USAGE)
        return key

    def has(self, word: str) -> bool:
        """True where `word` names something that is there. Raises ToolError."""
        return os.path.lexists(self.path(self.key(word)))

    def stats(self) -> dict[str, Any]:
        """`.ctx/stats`, the daemon's own account. Raises ToolError."""
        try:
            text = interruptible(Path(self.control("stats")).read_bytes)
            stats: dict[str, Any] = json.loads(text)
        except FileNotFoundError:
            raise no_mount(self.point) from None
        except OSError as error:
            raise failure(self.point, error) from error
        except ValueError as error:
            raise ToolError(f"its statistics are no JSON: {error}", subject=self.point) from error
        return stats


def find_mount(args: argparse.Namespace, words: Sequence[str]) -> Mount:
    """The mount to use for `words`. Raises ToolError where none or several could be meant."""
    mounts = _mounts.mounted()
    try:
        directory = os.getcwd()
    except OSError:  # removed meanwhile, or below a mount whose daemon is gone
        directory = "/"
    try:
        point = _mounts.choose(getattr(args, "mount", None), os.environ, words, directory, mounts)
    except LookupError as error:
        raise ToolError(
            str(error), "say which with --mount PATH or CTXFS_MOUNT", exit_code=USAGE
        ) from None
    return Mount(_mounts.resolve(point, mounts))


def open_mount(args: argparse.Namespace, words: Sequence[str]) -> Mount:
    """The mount to use for `words`, once it answers. Raises ToolError where it is none.

    A call into a mount whose daemon hangs cannot be interrupted from Python; this one can, and
    being never cached it always reaches the daemon.
    """
    mount = find_mount(args, words)
    try:
        interruptible(os.statvfs, mount.point)
    except (FileNotFoundError, NotADirectoryError):
        raise no_mount(mount.point) from None
    except OSError as error:
        raise failure(mount.point, error) from error
    return mount


def no_mount(point: str) -> ToolError:
    """What to say where no ctxfs is."""
    return ToolError("is not a ctxfs mount", "`ctx mount` makes one", subject=point)


# ---- blocks --------------------------------------------------------------------------------


class Entry(NamedTuple):
    """One name below the mount."""

    key: str
    is_directory: bool


def children(mount: Mount, key: str, *, hidden: bool = False) -> list[Entry]:
    """What lies directly beneath a directory, by name. Raises OSError.

    Names that begin with a dot (temporary ones) only if `hidden`; the daemon's own never.
    """
    prefix = f"{key}/" if key else ""
    with os.scandir(mount.path(key)) as entries:
        found = [
            Entry(prefix + entry.name, entry.is_dir(follow_symlinks=False))
            for entry in entries
            if (hidden or not entry.name.startswith(".")) and prefix + entry.name != CONTROL
        ]
    return sorted(found, key=lambda entry: os.fsencode(entry.key))


def walk(mount: Mount, key: str, *, hidden: bool = True) -> Iterator[Entry]:
    """Everything beneath a directory, each directory before what it holds.

    Directories that go meanwhile are passed over: blocks expire while somebody looks.
    """
    try:
        level = children(mount, key, hidden=hidden)
    except FileNotFoundError:
        return
    for entry in level:
        yield entry
        if entry.is_directory:
            yield from walk(mount, entry.key, hidden=hidden)


def read_story(mount: Mount, key: str) -> dict[str, Any]:
    """All that the daemon knows of a block, for the price of one call. Raises OSError.

    The names are those of `ctx stat --json`; sizes are bytes, `_s` is seconds.
    """
    raw = os.getxattr(mount.path(key), xattrs.STORY)
    story: dict[str, Any] = json.loads(raw.decode("utf-8", "surrogateescape"))
    story["key"] = key
    return story


def interruptible(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `function` so that Ctrl-C ends the program at once, however long the call takes.

    A call into a FUSE mount waits for the daemon and ignores signals that Python handles. It
    waits in a thread of its own, then; when the process ends, the kernel ends the call too.
    """
    answers: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def call() -> None:
        try:
            answers.put((function(*args, **kwargs), None))
        except BaseException as error:
            answers.put((None, error))

    threading.Thread(target=call, daemon=True).start()
    answer, error = answers.get()
    if error is not None:
        raise error
    return answer  # type: ignore[return-value]  # None only where T allows it


def set_attribute(mount: Mount, key: str, name: bytes, value: str) -> None:
    """Write an attribute and wait for what it starts. Raises OSError."""
    interruptible(os.setxattr, mount.path(key), name, os.fsencode(value))


def get_attribute(mount: Mount, key: str, name: bytes) -> str:
    """Read an attribute. Raises OSError."""
    return os.fsdecode(os.getxattr(mount.path(key), name))


def for_each(
    mount: Mount, words: Sequence[str], act: Callable[[str], dict[str, Any] | None], tally: Tally
) -> list[dict[str, Any]]:
    """Do `act(key)` for every word; returns one row a word, as `--json` prints them.

    A row has `key`, `ok` and what `act` returned, or `key`, `ok` and `error`.
    """
    rows: list[dict[str, Any]] = []
    for word in words:
        key = word
        try:
            key = mount.key(word)
            rows.append({"key": key, "ok": True, **(act(key) or {})})
        except OSError as error:
            told = failure(word, error)
        except ToolError as error:
            told = error
        else:
            continue
        tally.fail(told)
        rows.append({"key": key, "ok": False, "error": told.what})
    return rows
