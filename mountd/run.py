"""Assembles the daemon from a configuration, serves, and takes it apart again.

Order: device, tiers, store, mount, services. Leaving undoes it in reverse: unmount, finish what
was closed, write what only the hot tier has to the cold one, let go.
"""

from __future__ import annotations

import gc
import logging
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import trio

from ctxfs.config import Config, reread
from ctxfs.core.meta import BlockMeta, DirectoryMeta
from ctxfs.core.times import Now
from ctxfs.device import shm
from ctxfs.device.memory import give_back
from ctxfs.errors import ConfigError, CtxfsError
from ctxfs.store.attributes import Attributes
from ctxfs.store.catalog import Catalog
from ctxfs.store.coding import Coding, CodingSettings
from ctxfs.store.counters import Counters
from ctxfs.store.draining import Draining
from ctxfs.store.events import Events
from ctxfs.store.mover import Mover, MoverLimits
from ctxfs.store.recovery import recover
from ctxfs.store.store import Store
from ctxfs.tiers.cold import ColdTier, Recovered
from ctxfs.tiers.hot import HotTier
from ctxfs.tiers.warm import WarmTier
from mountd import channels, device_fuse, logs, mounts, systemd, watchdog
from mountd.alertness import Alertness
from mountd.channels import ChosenChannel
from mountd.check import memory_bytes
from mountd.control import ControlDirectory
from mountd.deadlines import Deadlines
from mountd.device_control import DeviceControl
from mountd.devices import Devices
from mountd.keyring import key_ring
from mountd.members_view import alone_as_json
from mountd.operations import Operations
from mountd.options import may_allow_other
from mountd.session import Session
from mountd.statistics import Statistics

if TYPE_CHECKING:
    from mountd.cluster import Cluster
    from mountd.membership import MembershipService

log = logging.getLogger(__name__)

SECOND_NS = 1_000_000_000
SPARE_DESCRIPTORS = 256
MISSING_NUMBERS = 1 << 40  # more than a device has that is not here, and others do not know of
SETTLE_S = 5.0  # at the end: how long sealing what was closed may take


def clock() -> Now:
    """Return this moment. Boot time goes on while the machine sleeps, and never steps."""
    return Now(time.clock_gettime_ns(time.CLOCK_BOOTTIME), time.time_ns())


def serve(config: Config, ready: Callable[[], None], fuse_fd: int | None = None) -> int:
    """Mount, call `ready` when the mount answers, serve until it ends. Returns the exit status.

    `fuse_fd`: a descriptor of /dev/fuse that outlives this process; if it is mounted, that mount
    goes on.
    """
    trio.run(_serve, config, ready, fuse_fd, strict_exception_groups=True)
    return 0


def raise_file_limit() -> int:
    """Take all descriptors we may have; return how many hot files may be open for clients.

    A mapped file costs two. Some are left for devices, /proc and what goes on in the background.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return (hard - min(SPARE_DESCRIPTORS, hard // 2)) // 2


async def _serve(config: Config, ready: Callable[[], None], fuse_fd: int | None) -> None:
    path = config.mount.path
    assert path is not None  # the command line has checked it
    with ExitStack() as rooms:
        room = rooms.enter_context(_hot_room(config))
        warm = rooms.enter_context(_warm_tier(config))
        async with trio.open_nursery() as services:
            session = _session(room, fuse_fd)
            daemon = await _assemble(config, room, warm, services, session)
            # Only now: until the new mount is there, programs see that the old one is dead, and
            # not the directory beneath it.
            if fuse_fd is None or device_fuse.is_unused(fuse_fd):
                await trio.to_thread.run_sync(mounts.prepare, path)
            with _mounter(daemon.channel)(
                daemon.operations,
                path,
                fsname=config.mount.fsname,
                allow_other=may_allow_other(config.mount),
                chosen=daemon.channel,
                session=session,
                fuse_fd=fuse_fd,
            ) as mount:
                async with trio.open_nursery() as nursery:
                    await nursery.start(_run_signals, daemon, nursery.cancel_scope)
                    await nursery.start(mount.serve, nursery.cancel_scope)
                    gc.freeze()  # what was found stays: no use looking there for garbage
                    give_back()  # columns of all that was found, and what they were read from
                    nursery.start_soon(watchdog.watched, _on_stall(fuse_fd))
                    daemon.devices.say_what_is_missing()
                    daemon.devices.remember()
                    ready()
            with trio.CancelScope(shield=True):
                await daemon.finish()
            services.cancel_scope.cancel()
        daemon.close()


def _on_stall(fuse_fd: int | None) -> Callable[[], None]:
    """What is done when the loop stands still; a parent, if there is one, starts the next."""
    return partial(watchdog.stalled_main, has_heir=fuse_fd is not None)


class Mount(Protocol):
    """What both channels give: somebody who answers the kernel."""

    async def serve(
        self, scope: trio.CancelScope, task_status: trio.TaskStatus[None] = ...
    ) -> None: ...


class Mounter(Protocol):
    """How both channels mount."""

    def __call__(
        self,
        operations: Operations,
        path: Path,
        *,
        fsname: str,
        allow_other: bool,
        chosen: ChosenChannel,
        session: Session | None,
        fuse_fd: int | None,
    ) -> AbstractContextManager[Mount]: ...


def _mounter(chosen: ChosenChannel) -> Mounter:
    # Imported when chosen: a machine that uses the one need not have the other.
    if chosen.name == channels.DIRECT:
        from mountd import channel_direct

        return channel_direct.mounted
    from mountd import channel_pyfuse3

    return channel_pyfuse3.mounted


def _session(room: shm.Room, fuse_fd: int | None) -> Session | None:
    """What is open in a mount that outlives us; begun anew where there is no such mount yet."""
    if fuse_fd is None:
        return None
    session = Session(room.path / "session")
    if session.resumed is not None and not device_fuse.is_mounted(fuse_fd):
        session.begin()
    return session


@contextmanager
def _hot_room(config: Config) -> Iterator[shm.Room]:
    """The tmpfs. It goes at a clean end; after a crash it stays, for the next daemon to find."""
    with _kept(shm.prepare(config.state, config.hot.size_bytes, config.hot.huge)) as room:
        yield room


@contextmanager
def _warm_tier(config: Config) -> Iterator[WarmTier | None]:
    """The warm tier, in a room that goes and stays like that of the hot one."""
    size_bytes = config.warm.size_bytes
    if not size_bytes:
        shm.discard(config.state, shm.WARM)  # what an earlier daemon, with another size, left
        yield None
        return
    with _kept(shm.prepare(config.state, size_bytes, "never", name=shm.WARM)) as room:
        warm = WarmTier(room.path, min(size_bytes, room.size_bytes))
        try:
            yield warm
        finally:
            warm.close()


@contextmanager
def _kept(room: shm.Room) -> Iterator[shm.Room]:
    try:
        yield room
    except BaseException as error:
        expected = all(isinstance(each, CtxfsError) for each in _leaves(error))
        if expected and not room.is_adopted:
            room.remove()
        else:
            room.close()
        raise
    room.remove()


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from _leaves(each)
    else:
        yield error


class Daemon:
    """The assembled parts, and what happens to them on SIGHUP and at the end."""

    def __init__(
        self,
        config: Config,
        catalog: Catalog,
        devices: Devices,
        session: Session | None,
        services: trio.Nursery,
        members: MembershipService | None = None,
    ) -> None:
        self.config = config
        self.hot = catalog.hot
        self.cold = catalog.cold
        self.catalog = catalog
        self.devices = devices
        self.channel = channels.choose(config.mount.channel)
        self.coding = Coding(coding_settings(config))
        self.mover = Mover(catalog, mover_limits(config), self.coding)
        self.store = Store(catalog, self.mover, block_bytes_max=config.limits.block_bytes_max)
        self.deadlines = Deadlines(
            catalog,
            deadline_s=config.limits.operation_deadline_ns / SECOND_NS,
            trouble_is_error=config.defaults.on_trouble == "error",
        )
        self.alertness = Alertness(wanted=config.mount.quick_wakeups)
        self.cluster = _cluster(config, self.store, members)
        draining = Draining(catalog, self.mover)
        assert config.mount.path is not None
        self.device_control = DeviceControl(catalog, draining, devices, services, config.mount.path)
        statistics = Statistics(
            catalog,
            mount=str(config.mount.path),
            state=str(config.state),
            channel=self.channel,
            deadlines=self.deadlines,
            devices=devices,
            device_work=self.device_control.as_list,
            cluster=None if self.cluster is None else self.cluster.statistics,
        )
        control = ControlDirectory(
            catalog.events,
            {
                b"stats": statistics.as_json,
                b"metrics": statistics.as_metrics,
                b"config": lambda: self.config.as_toml().encode(),
                b"peers": alone_as_json if self.cluster is None else self.cluster.as_json,
            },
            self.device_control.commands,
        )
        self.attributes = Attributes(self.store, bytes_max=config.limits.attributes_bytes_max)
        if self.cluster is not None:
            self.attributes.replicas = self.cluster.replicas
        self.operations = Operations(
            self.store,
            self.attributes,
            control,
            self.deadlines,
            self.alertness,
            trouble_is_error=config.defaults.on_trouble == "error",
            session=session,
        )

    def apply(self, config: Config) -> None:
        """Take over what can be changed while running. Raises ConfigError, with nothing done."""
        self.coding.settings = coding_settings(config)
        self.config = config
        self.catalog.default_ttl_ns = config.defaults.ttl_ns or 0
        self.mover.limits = mover_limits(config)
        self.store.content.block_bytes_max = config.limits.block_bytes_max
        self.attributes.bytes_max = config.limits.attributes_bytes_max
        trouble_is_error = config.defaults.on_trouble == "error"
        self.operations.trouble_is_error = self.deadlines.trouble_is_error = trouble_is_error
        self.alertness.wanted = config.mount.quick_wakeups
        self.deadlines.deadline_s = config.limits.operation_deadline_ns / SECOND_NS
        if self.cluster is not None:
            self.cluster.apply(config.cluster)

    def reread(self) -> None:
        """SIGHUP: the log file anew, and the configuration as far as it can be taken over."""
        logs.reopen()
        try:
            fresh, waiting = reread(self.config, memory_bytes=memory_bytes())
            self.apply(fresh)
        except ConfigError as error:
            log.error("the configuration stays as it was: %s", error)
            return
        logs.set_level(fresh.log)
        if waiting:
            log.warning("these take effect at the next start: %s", ", ".join(waiting))
        log.info("configuration reread")

    async def finish(self) -> None:
        """After the mount ended: finish what was closed, and save what only DRAM holds."""
        systemd.stopping("saving blocks to the cold tier")
        with trio.move_on_after(SETTLE_S):
            await self.store.sealing.wait_settled()
        if self.cold is None:
            return
        await self.device_control.stop()
        with trio.move_on_after(self.config.limits.drain_ns / SECOND_NS) as scope:
            left = await self.store.upkeep.drain()
            if left:
                log.warning("%d blocks could not be saved", left)
        if scope.cancelled_caught:
            log.warning("not every block was saved within limits.drain")
        try:
            await self.cold.close()
        except CtxfsError as error:
            log.error("the cold tier was not closed cleanly: %s", error)

    def close(self) -> None:
        """Let go of files; services have ended."""
        self.coding.close()
        self.hot.close()
        self.devices.close_all()


def coding_settings(config: Config) -> CodingSettings:
    """What the codec is asked for. Raises ConfigError where keys cannot be had."""
    codec = config.codec
    return CodingSettings(
        compress=codec.compress == "auto",
        level=codec.level,
        gain_ratio=codec.gain_ratio,
        keys=key_ring(codec),
        share=codec.dedup,
    )


def mover_limits(config: Config) -> MoverLimits:
    """What the mover needs of the configuration."""
    return MoverLimits(
        high_ratio=config.hot.high_ratio,
        low_ratio=config.hot.low_ratio,
        room_wait_s=config.hot.room_wait_ns / SECOND_NS,
        read_deadline_s=config.limits.read_deadline_ns / SECOND_NS,
        temporary_wait_ns=config.defaults.temporary_wait_ns,
        cold_bytes_per_day=config.limits.cold_bytes_per_day,
    )


async def _assemble(
    config: Config,
    room: shm.Room,
    warm: WarmTier | None,
    services: trio.Nursery,
    session: Session | None,
) -> Daemon:
    hot = HotTier(
        room.path,
        min(config.hot.size_bytes, room.size_bytes),
        huge=room.huge,
        files_max=raise_file_limit(),
        is_alone=room.mounted,
    )
    events = Events(config.limits.events_kept)
    devices = Devices(services, config.state)
    catalog: Catalog | None = None

    def describe(generation: int) -> BlockMeta | None:
        return catalog.describe(generation) if catalog is not None else None

    def describe_directory(inode: int) -> DirectoryMeta | None:
        return catalog.describe_directory(inode) if catalog is not None else None

    cold: ColdTier | None = None
    found: Recovered | None = None
    if config.cold:
        cold = await ColdTier.open(
            await devices.open_all(config.cold),
            describe=describe,
            describe_directory=describe_directory,
        )
        found = await cold.recover(missing=devices.look_for_missing())
    catalog = Catalog(clock, hot, cold, events, Counters(), warm)
    catalog.default_ttl_ns = config.defaults.ttl_ns or 0
    members = _membership(config, hot, cold)
    daemon = Daemon(config, catalog, devices, session, services, members)
    report = recover(catalog, found, _keep_open(catalog, session))
    log.info(
        "found %d blocks (%d hot, %d warm, %d cold) and %d directories; %d unsealed were dropped",
        report.blocks, report.hot, report.warm, report.cold, report.directories, report.unsealed,
    )  # fmt: skip
    if devices.look_for_missing():
        # Numbers that are on a device which comes back later must not have been used again: what
        # was written meanwhile is the newer.
        catalog.next_generation += MISSING_NUMBERS
        catalog.next_stamp += MISSING_NUMBERS
    _prepare_root(catalog, config)
    if cold is not None:
        await services.start(_run_cold, cold)
    if members is not None:
        await services.start(members.run)
    await services.start(daemon.deadlines.run)
    await services.start(daemon.mover.run)
    await services.start(daemon.store.run)
    if daemon.cluster is not None:
        await services.start(daemon.cluster.run)
    return daemon


def _membership(config: Config, hot: HotTier, cold: ColdTier | None) -> MembershipService | None:
    """Who else there is; None where this daemon is in no cluster. Raises ConfigError."""
    if config.cluster.id is None:
        return None
    # Imported when needed: the client of etcd is large.
    from mountd.membership import MembershipService

    weight_bytes = hot.capacity_bytes
    if cold is not None:
        weight_bytes = sum(device.capacity_bytes for device in cold.statistics())
    return MembershipService(
        config.cluster,
        config.state,
        weight_bytes=weight_bytes,
        wall_ns=lambda: clock().wall_ns,
    )


def _cluster(config: Config, store: Store, members: MembershipService | None) -> Cluster | None:
    """This daemon as one of several. Raises ConfigError."""
    if members is None:
        return None
    from mountd.cluster import Cluster

    return Cluster(config.cluster, config.state, store, members)


def _keep_open(catalog: Catalog, session: Session | None) -> set[int] | None:
    """Have what is open written down; return what was in a mount that goes on."""
    if session is None:
        return None

    def resized() -> None:
        catalog.hot.beside_bytes = session.physical_bytes

    resized()
    session.resized = resized
    catalog.keeps_transients = True
    catalog.hot.journal.before_append = session.mark
    if session.resumed is None:
        return None
    opened = {file.generation for file in session.files()}
    return opened | {redirect.held for redirect in session.redirects()} - {0}


async def _run_cold(
    cold: ColdTier, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    await cold.run(task_status=task_status)


def _prepare_root(catalog: Catalog, config: Config) -> None:
    root = catalog.names.root
    if root.stamp:
        return  # somebody changed it in an earlier life
    root.mode = config.defaults.root_mode
    root.uid, root.gid = os.getuid(), os.getgid()
    root.mtime_ns = catalog.clock().wall_ns


async def _run_signals(
    daemon: Daemon,
    scope: trio.CancelScope,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """SIGTERM and SIGINT end the mount, SIGHUP rereads."""
    watched = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    with trio.open_signal_receiver(*watched) as arriving:
        task_status.started()
        async for number in arriving:
            if number == signal.SIGHUP:
                daemon.reread()
            else:
                log.info("ending: %s", signal.Signals(number).name)
                scope.cancel()
                return
