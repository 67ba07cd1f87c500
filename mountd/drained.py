"""Which cold devices were drained, so that one that is pulled out stops no start.

They stand in the state directory until they are taken out of the configuration, or are used again.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from ctxfs.settings import ColdConfig

log = logging.getLogger(__name__)

DRAINED_FILE = "cold-drained"


def read_paths(file: Path) -> list[str]:
    """The paths in a list of the state directory; none where there is no list."""
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return []
    return [path for path in found if isinstance(path, str)] if isinstance(found, list) else []


def write_paths(file: Path, paths: Iterable[str]) -> None:
    """Have such a list on the medium: all of it, or the one before. A failure is logged."""
    fresh = file.with_suffix(".new")
    try:
        fresh.touch(mode=0o600)
        with fresh.open("w") as writing:
            writing.write(json.dumps(sorted(paths)) + "\n")
            writing.flush()
            os.fsync(writing.fileno())
        fresh.replace(file)
        directory = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError as error:
        log.warning("%s cannot be written: %s", file, error.strerror)


def present(cold: Sequence[ColdConfig], state: Path) -> list[ColdConfig]:
    """The configured devices but for those that were drained and are not here any more."""
    drained = read_paths(state / DRAINED_FILE)
    return [each for each in cold if str(each.path) not in drained or each.path.exists()]


def say_what_is_gone(cold: Sequence[ColdConfig], state: Path) -> None:
    """Tell of the others."""
    here = present(cold, state)
    for each in cold:
        if each not in here:
            log.warning(
                "%s was drained and is not here any more: the tier goes on without it; "
                "take it out of the configuration",
                each.path,
            )


def add(path: str, state: Path) -> None:
    """This device was drained."""
    write_paths(state / DRAINED_FILE, {*read_paths(state / DRAINED_FILE), path})


def forget(state: Path, *, configured: Collection[str], used: Collection[str]) -> None:
    """Only what is configured, and not used, is of interest."""
    before = read_paths(state / DRAINED_FILE)
    left = [path for path in before if path in configured and path not in used]
    if left != before:
        write_paths(state / DRAINED_FILE, left)
