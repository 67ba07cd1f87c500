"""`.ctx`: the daemon's own directory in the mount. Each file is made when it is opened."""

from __future__ import annotations

import os
import stat
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import trio

from ctxfs.errors import NotPermitted
from ctxfs.store.events import Events

DIRECTORY_NAME = b".ctx"
DIRECTORY_INODE = 2
# A read that waits for events ends after so long, with no bytes: a reader that is killed waits
# for its answer, and must not wait for an event that may never come.
EVENTS_WAIT_S = 1.0

Reader = Callable[[int, int], Awaitable[bytes]]
Command = Callable[[bytes], Awaitable[None]]  # what is done when an attribute of `.ctx` is set


@dataclass(frozen=True, slots=True)
class ControlFile:
    """One file of `.ctx`."""

    name: bytes
    inode: int
    mode: int
    open: Callable[[], Reader]


class ControlDirectory:
    """The files of `.ctx`, by name and by inode."""

    def __init__(
        self,
        events: Events,
        texts: dict[bytes, Callable[[], bytes]],
        commands: Mapping[bytes, Command],
    ) -> None:
        self._events = events
        self._commands = commands
        files = [
            ControlFile(name, 0, stat.S_IFREG | 0o444, _snapshot(make))
            for name, make in texts.items()
        ]
        # Events name everybody's keys, so they are for the daemon's own user.
        private = stat.S_IFREG | 0o400
        files.append(ControlFile(b"events", 0, private, self._follow))
        files.append(ControlFile(b"events.recent", 0, private, _snapshot(events.recent)))
        self.files = [
            ControlFile(file.name, DIRECTORY_INODE + number, file.mode, file.open)
            for number, file in enumerate(files, 1)
        ]
        self.by_name = {file.name: file for file in self.files}
        self.by_inode = {file.inode: file for file in self.files}

    def has(self, inode: int) -> bool:
        """Whether an inode is the directory or one of its files."""
        return inode == DIRECTORY_INODE or inode in self.by_inode

    async def set_attribute(self, inode: int, name: bytes, value: bytes, uid: int) -> None:
        """Do what setting this attribute asks for: of the directory, by root or our own user.

        Raises NotPermitted, and what the command raises.
        """
        command = self._commands.get(name) if inode == DIRECTORY_INODE else None
        if command is None:
            raise NotPermitted(".ctx belongs to the daemon")
        if uid not in (0, os.getuid()):
            raise NotPermitted(f"{os.fsdecode(name)} is for root and the daemon's own user")
        await command(value)

    def _follow(self) -> Reader:
        """Return a reader of the stream: what is remembered first, then what comes."""
        number = 0
        rest = b""

        async def read(offset: int, length: int) -> bytes:
            nonlocal number, rest
            if not rest:
                with trio.move_on_after(EVENTS_WAIT_S):
                    number, rest = await self._events.wait_after(number)
            piece, rest = rest[:length], rest[length:]
            return piece

        return read


def _snapshot(make: Callable[[], bytes]) -> Callable[[], Reader]:
    def open_() -> Reader:
        content = make()

        async def read(offset: int, length: int) -> bytes:
            return content[offset : offset + length]

        return read

    return open_
