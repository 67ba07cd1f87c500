"""The devices and files of the cold tier: opened, run until they are closed, and remembered."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import trio

from ctxfs.device.blockfile import OpenedDevice, open_engine
from ctxfs.errors import DeviceBusy
from ctxfs.settings import ColdConfig
from ctxfs.tiers.cold import ColdDevice
from ctxfs.tiers.cold_volume import START_BYTES, recognise
from mountd import drained

log = logging.getLogger(__name__)

LIST_FILE = "cold-devices"  # in the state directory: paths, as JSON


@dataclass(slots=True)
class _Running:
    """A device that is open, and what ends its engine."""

    opened: OpenedDevice
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    ended: trio.Event = field(default_factory=trio.Event)


def _look_before_it_grows(path: Path) -> None:
    """Raises ConfigError or ForeignSignature for a file that is not to be grown to a size.

    Once it has grown, nobody sees that it was cut short, and what was somebody else's has changed.
    """
    try:
        if not path.is_file():
            return
        with path.open("rb") as file:
            start = file.read(START_BYTES)
            length = os.fstat(file.fileno()).st_size
    except OSError:
        return  # opening it says what is wrong in better words
    recognise(str(path), start.ljust(START_BYTES, b"\0"), length)


class Devices:
    """By the path under which each was configured, or added."""

    def __init__(self, services: trio.Nursery, state: Path) -> None:
        self._services = services
        self._list = state / LIST_FILE
        self._running: dict[str, _Running] = {}
        self._missing: list[str] = []

    @property
    def why_not_uring(self) -> Mapping[str, str]:
        """By path, where io_uring is not used."""
        reasons = {path: each.opened.why_not_uring for path, each in self._running.items()}
        return {path: why for path, why in reasons.items() if why is not None}

    async def open(self, config: ColdConfig) -> ColdDevice:
        """Open one and run its engine.

        Raises ConfigError, ForeignSignature, DeviceBusy where it is open already.
        """
        path = str(config.path)
        if path in self._running:
            raise DeviceBusy(f"{path} is a device of this cold tier already")
        if not config.format:
            await trio.to_thread.run_sync(_look_before_it_grows, config.path)
        opened = await open_engine(config.path, config.size_bytes, engine=config.engine)
        running = self._running[path] = _Running(opened)
        await self._services.start(self._run, running)
        if opened.why_not_uring is not None:
            log.warning("%s: no io_uring (%s); reads and writes use threads",
                        path, opened.why_not_uring)  # fmt: skip
        return ColdDevice(path, opened.engine, config.format, size_bytes=config.size_bytes)

    async def open_all(self, cold: Sequence[ColdConfig]) -> list[ColdDevice]:
        """Open what is configured, but for what was drained and is not here any more."""
        state = self._list.parent
        drained.say_what_is_gone(cold, state)
        opened = [await self.open(each) for each in drained.present(cold, state)]
        drained.forget(state, configured=[str(each.path) for each in cold], used=self._running)
        return opened

    async def _run(
        self, running: _Running, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        try:
            with running.scope:
                await running.opened.run(task_status)
        finally:
            running.ended.set()

    def find(self, path: str) -> str | None:
        """The path under which this device is known, by whatever link it is named now.

        To be called in a thread: a link may lead below our own mount.
        """
        running = list(self._running)
        if path in running:
            return path
        real = os.path.realpath(path)
        return next((known for known in running if os.path.realpath(known) == real), None)

    async def grow(self, path: str, size_bytes: int | None) -> int:
        """Have its engine reach as far as there is something. Raises ConfigError."""
        return await self._running[path].opened.grow(size_bytes)

    async def close(self, path: str) -> None:
        """End one that nobody uses any more."""
        running = self._running[path]
        running.scope.cancel()
        with trio.CancelScope(shield=True):  # it ends when the kernel has let go of all memory
            await running.ended.wait()
        del self._running[path]
        running.opened.close()

    def close_all(self) -> None:
        """Let go of them; services have ended."""
        for running in self._running.values():
            running.opened.close()
        self._running.clear()

    # -- remembering

    def look_for_missing(self) -> bool:
        """Whether devices of an earlier life are not here. They are remembered until they are."""
        self._missing = [path for path in self._remembered() if self.find(path) is None]
        return bool(self._missing)

    def say_what_is_missing(self) -> None:
        """Tell of them: blocks that are on them are misses until they are back."""
        for path in self._missing:
            log.warning(
                "%s was a device of this cold tier and is not configured any more: blocks on it "
                "are missing until it is, and nothing on it was changed; if it never comes back, "
                "take it out of %s",
                path,
                self._list,
            )

    def remember(self, gone: str | None = None) -> None:
        """Write down which there are, and were, but for the one that is gone for good."""
        before = self._remembered()
        paths = sorted({*self._running, *before} - {gone})
        if paths == before:
            return
        drained.write_paths(self._list, paths)

    def was_drained(self, path: str) -> None:
        """It is empty, and nobody will miss it."""
        self.remember(gone=path)
        drained.add(path, self._list.parent)

    def _remembered(self) -> list[str]:
        return drained.read_paths(self._list)
