"""One line in the log of a member that takes nothing, though thousands of things wait for it."""

from __future__ import annotations

import logging


class ToldOnce:
    """Each thing that waits is tried again and again; the first try that fails is told."""

    def __init__(self, log: logging.Logger, what: str) -> None:
        self._log = log
        self._what = what
        self._told: set[str] = set()

    def waits(self, name: str, why: object) -> None:
        """A member did not take something."""
        level = logging.DEBUG if name in self._told else logging.INFO
        self._told.add(name)
        self._log.log(level, "%s wait for %s: %s", self._what, name, why)

    def takes(self, name: str) -> None:
        """It took something: what fails next is told again."""
        self._told.discard(name)
