"""Cold devices come, go and grow while the daemon runs: what is asked for through `.ctx`."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import trio

from ctxfs import xattrs
from ctxfs.core.meta import DirectoryMeta
from ctxfs.errors import BadValue, ConfigError, CtxfsError, DeviceBusy, NoSuchDevice
from ctxfs.settings import ColdConfig
from ctxfs.store.catalog import Catalog
from ctxfs.store.draining import Draining
from ctxfs.tiers.cold import ColdTier
from ctxfs.tiers.cold_drain import Drain
from ctxfs.tiers.cold_leaving import LeavingState
from ctxfs.units import parse_size
from mountd.control import Command
from mountd.devices import Devices
from mountd.values import split_device

log = logging.getLogger(__name__)

BEGIN_S = 5.0  # who asks waits so long for how it went; what takes longer goes on without
JOBS_KEPT = 16

Work = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The device that somebody named."""

    path: str
    size_bytes: int | None
    known: str | None  # the path under which the tier has it


@dataclass(slots=True, eq=False)
class _Job:
    """One thing that was asked for."""

    what: str  # "add", "drain", "grow"
    path: str
    error: CtxfsError | None = None
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    ended: trio.Event = field(default_factory=trio.Event)

    def as_dict(self) -> dict[str, Any]:
        state = "running"
        if self.ended.is_set():
            state = "failed" if self.error is not None else "done"
        error = str(self.error) if self.error is not None else None
        return {"what": self.what, "path": self.path, "state": state, "error": error}


class DeviceControl:
    """One piece of work a device at a time; several devices at once."""

    def __init__(
        self,
        catalog: Catalog,
        draining: Draining,
        devices: Devices,
        services: trio.Nursery,
        mount: Path,
    ) -> None:
        self._mount = str(mount)
        self._catalog = catalog
        self._draining = draining
        self._devices = devices
        self._services = services
        self._jobs: deque[_Job] = deque(maxlen=JOBS_KEPT)
        self._running: list[_Job] = []
        self.commands: Mapping[bytes, Command] = {
            xattrs.DEVICE_ADD: partial(self._command, "add", self._add),
            xattrs.DEVICE_DRAIN: partial(self._command, "drain", self._drain),
            xattrs.DEVICE_GROW: partial(self._command, "grow", self._grow),
        }

    def as_list(self) -> list[dict[str, Any]]:
        """What was asked for last, and how it went: for `.ctx/stats`."""
        return [job.as_dict() for job in self._jobs]

    async def stop(self) -> None:
        """End what is being done. A drain can be begun again; nothing it has done is undone."""
        for job in list(self._running):
            job.scope.cancel()
            await job.ended.wait()

    async def _command(self, what: str, begin: Callable[[_Wanted], Work], value: bytes) -> None:
        """Begin; return when it is done, or takes long. Raises CtxfsError for how it ended."""
        text = os.fsdecode(value)
        job = _Job(what, text)
        try:
            wanted = await trio.to_thread.run_sync(self._read, text)
            job.path = wanted.known or wanted.path
            work = begin(wanted)
        except CtxfsError as error:
            log.error("cannot %s the cold device %s: %s", what, job.path, error)
            job.error = error
            job.ended.set()
            self._jobs.append(job)
            raise
        self._jobs.append(job)
        self._running.append(job)
        self._services.start_soon(self._run, job, work)
        with trio.move_on_after(BEGIN_S if what != "drain" else 0):
            await job.ended.wait()
        if job.error is not None:
            raise type(job.error)(str(job.error))

    async def _run(self, job: _Job, work: Work) -> None:
        try:
            with job.scope:
                await work()
        except CtxfsError as error:
            log.error("cannot %s the cold device %s: %s", job.what, job.path, error)
            job.error = error
        finally:
            self._running.remove(job)
            job.ended.set()

    def _is_worked_on(self, path: str) -> bool:
        return any(job.path == path for job in self._running)

    @property
    def _cold(self) -> ColdTier:
        if self._catalog.cold is None:
            raise ConfigError(
                "there is no cold tier: put a [[cold]] table into the configuration file, "
                "and start the daemon again"
            )
        return self._catalog.cold

    def _read(self, text: str) -> _Wanted:
        """In a thread, since links may lead anywhere. Raises ConfigError, BadValue."""
        if not text.startswith("/") or "\0" in text:
            raise BadValue(f"{text!r} is not an absolute path")
        path, size = split_device(os.path.normpath(text))
        if os.path.commonpath([path, self._mount]) == self._mount:
            raise ConfigError(f"{path} lies in this mount itself")
        size_bytes = parse_size(size) if size is not None else None
        return _Wanted(path, size_bytes, self._devices.find(path))

    # -- add

    def _add(self, wanted: _Wanted) -> Work:
        cold, path = self._cold, wanted.path
        config = ColdConfig(path=Path(wanted.known or path), size_bytes=wanted.size_bytes)
        if wanted.known is not None and self._leaves(wanted.known):
            return partial(self._keep, config, cold)
        if wanted.known is not None or self._is_worked_on(path):
            raise DeviceBusy(f"{path} is a device of this cold tier already")
        return partial(self._take, config, cold)

    def _leaves(self, path: str) -> bool:
        devices = {each.path: each for each in self._cold.statistics()}
        return path in devices and devices[path].left_blocks is not None

    async def _keep(self, config: ColdConfig, cold: ColdTier) -> None:
        """End its drain: blocks that have left stay where they are."""
        path = str(config.path)
        for job in [each for each in self._running if each.what == "drain"]:
            if job.path == path:
                job.scope.cancel()
                await job.ended.wait()
        try:
            cold.end_drain(path)
        except NoSuchDevice:  # it was drained meanwhile
            await self._take(config, cold)
        else:
            log.info("cold device %s: its drain is ended, and it takes blocks again", path)

    async def _take(self, config: ColdConfig, cold: ColdTier) -> None:
        path = str(config.path)
        device = await self._devices.open(config)
        try:
            await cold.add_device(device, self._directories)
        except CtxfsError:
            if path not in {each.path for each in cold.statistics()}:
                await self._devices.close(path)
            raise
        self._devices.remember()
        log.info(
            "cold device %s is added; put it into the configuration file, too: "
            "without that it is not there after the next start",
            path,
        )

    def _directories(self) -> list[DirectoryMeta]:
        inodes = self._catalog.names.by_inode.directories
        metas = [self._catalog.describe_directory(inode) for inode in inodes]
        return [meta for meta in metas if meta is not None]

    # -- drain

    def _known(self, wanted: _Wanted) -> str:
        """The path of a device that nothing is done with. Raises NoSuchDevice, DeviceBusy."""
        _ = self._cold
        if wanted.known is None:
            raise NoSuchDevice(f"{wanted.path} is no device of the cold tier")
        if self._is_worked_on(wanted.known):
            raise DeviceBusy(f"{wanted.known} is being worked on already")
        return wanted.known

    def _drain(self, wanted: _Wanted) -> Work:
        known = self._known(wanted)
        if wanted.size_bytes is not None:
            raise BadValue(f"{known}: only all of a device can be drained")
        return partial(self._empty, known, self._draining.begin(known))

    async def _empty(self, path: str, drain: Drain) -> None:
        log.info("cold device %s: draining", path)
        await drain.run()
        if drain.leaving.state is not LeavingState.DRAINED:
            return  # said by the drain itself; the device's state tells
        await self._devices.close(path)
        self._devices.was_drained(path)

    # -- grow

    def _grow(self, wanted: _Wanted) -> Work:
        return partial(self._enlarge, self._cold, self._known(wanted), wanted.size_bytes)

    async def _enlarge(self, cold: ColdTier, path: str, size_bytes: int | None) -> None:
        usable = await self._devices.grow(path, size_bytes)
        if size_bytes is not None:
            usable = min(usable, size_bytes)
        if not await cold.grow_device(path, usable):
            raise ConfigError(
                f"{path}: {usable} bytes are not a segment more than it has now: "
                "make the file or the device larger first, or give a larger size"
            )
        log.info(
            "cold device %s: %d bytes are used now; where the configuration file "
            "gives it a size, that must be as large",
            path,
            usable,
        )
