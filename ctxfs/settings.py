"""What can be configured: one frozen class per table of the file, one field per key.

Each field carries its key and the kind of its value, so that reading, writing, rereading and the
test that holds the manual page against the program all follow from this one place.
"""

import dataclasses
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ctxfs.addresses import ZONE_DEFAULT, ListedMember
from ctxfs.kinds import (
    ADDRESS,
    AUTO,
    COUNT,
    DURATION,
    FLAG,
    FSNAME,
    HOSTNAME,
    MEMBERS,
    MODE,
    NAME,
    PATH,
    RATIO,
    SIZE,
    URLS,
    WAIT,
    ZONE,
    Kind,
    TomlValue,
    one_of,
)
from ctxfs.units import DAY_NS, GIB, KIB, MIB, MILLISECOND_NS, MINUTE_NS, SECOND_NS

Channel = Literal["auto", "direct", "pyfuse3"]
Huge = Literal["within_size", "always", "never"]
Compress = Literal["auto", "never"]
EngineName = Literal["auto", "io_uring", "threads", "nvme"]
OnTrouble = Literal["miss", "error"]
Fsync = Literal["local", "replicas"]
LogFormat = Literal["human", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Setting:
    """One key of the file. `reread`: SIGHUP takes over a new value."""

    key: str
    kind: Kind
    reread: bool = False


def _key(key: str, kind: Kind, *, reread: bool = False) -> dict[str, Setting]:
    return {"setting": Setting(key, kind, reread)}


def settings_of(table: type) -> Iterator[tuple[str, Setting]]:
    """Field name and setting of every key in a table's class."""
    for each in dataclasses.fields(table):
        if "setting" in each.metadata:
            yield each.name, each.metadata["setting"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MountConfig:
    """`[mount]`: where, and how the kernel is spoken to. `allow_other` None: where permitted."""

    path: Path | None = field(default=None, metadata=_key("path", PATH))
    channel: Channel = field(
        default="auto", metadata=_key("channel", one_of("auto", "direct", "pyfuse3"))
    )
    allow_other: bool | None = field(default=None, metadata=_key("allow_other", AUTO))
    fsname: str = field(default="ctxfs", metadata=_key("fsname", FSNAME))
    quick_wakeups: bool = field(default=True, metadata=_key("quick_wakeups", FLAG, reread=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class HotConfig:
    """`[hot]`: the tier in DRAM. Above `high_ratio` of its size room is made, down to `low_ratio`.

    `room_wait_ns` is how long a create or a write waits for room before it fails.
    """

    size_bytes: int = field(metadata=_key("size", SIZE))
    high_ratio: float = field(default=0.95, metadata=_key("high", RATIO, reread=True))
    low_ratio: float = field(default=0.90, metadata=_key("low", RATIO, reread=True))
    room_wait_ns: int = field(default=5 * SECOND_NS, metadata=_key("room_wait", WAIT, reread=True))
    huge: Huge = field(
        default="within_size", metadata=_key("huge", one_of("within_size", "always", "never"))
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmConfig:
    """`[warm]`: compressed DRAM; 0: none."""

    size_bytes: int = field(default=0, metadata=_key("size", SIZE))


@dataclass(frozen=True, kw_only=True, slots=True)
class CodecConfig:
    """`[codec]`: how blocks are kept in the warm and the cold tier.

    `gain_ratio`: what compression has to save of a block at least, as a part of it. Keys come
    from `key_file` or from the kernel's keyring; without both nothing is encrypted. `dedup`: the
    cold tier stores a content once.
    """

    compress: Compress = field(
        default="auto", metadata=_key("compress", one_of("auto", "never"), reread=True)
    )
    level: int = field(default=1, metadata=_key("level", COUNT, reread=True))
    gain_ratio: float = field(default=0.05, metadata=_key("gain", RATIO, reread=True))
    dedup: bool = field(default=True, metadata=_key("dedup", FLAG, reread=True))
    key_file: Path | None = field(default=None, metadata=_key("key_file", PATH, reread=True))
    keyring: str | None = field(default=None, metadata=_key("keyring", NAME, reread=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class ColdConfig:
    """One `[[cold]]`: a device or file. `size_bytes` None: all of what is there."""

    path: Path = field(metadata=_key("path", PATH))
    size_bytes: int | None = field(default=None, metadata=_key("size", SIZE))
    format: bool = field(default=False, metadata=_key("format", FLAG))
    engine: EngineName = field(
        default="auto", metadata=_key("engine", one_of("auto", "io_uring", "threads", "nvme"))
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class DefaultsConfig:
    """`[defaults]`: what holds for blocks and directories that say nothing themselves.

    `ttl_ns` None: blocks do not expire. `temporary_wait_ns` is how long names that look temporary
    (`*.tmp*`, a leading dot) stay in the hot tier before they may move.
    """

    ttl_ns: int | None = field(default=None, metadata=_key("ttl", DURATION, reread=True))
    on_trouble: OnTrouble = field(
        default="miss", metadata=_key("on_trouble", one_of("miss", "error"), reread=True)
    )
    root_mode: int = field(default=0o1777, metadata=_key("root_mode", MODE))
    temporary_wait_ns: int = field(
        default=30 * SECOND_NS, metadata=_key("temporary_wait", WAIT, reread=True)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """`[limits]`: bounds on what one block, one request or one queue may take."""

    block_bytes_max: int = field(default=16 * GIB, metadata=_key("block_max", SIZE, reread=True))
    attributes_bytes_max: int = field(
        default=64 * KIB, metadata=_key("attributes_max", SIZE, reread=True)
    )
    events_kept: int = field(default=1000, metadata=_key("events_kept", COUNT))
    read_deadline_ns: int = field(
        default=30 * SECOND_NS, metadata=_key("read_deadline", WAIT, reread=True)
    )
    operation_deadline_ns: int = field(
        default=120 * SECOND_NS, metadata=_key("operation_deadline", WAIT, reread=True)
    )
    cold_bytes_per_day: int | None = field(
        default=None, metadata=_key("cold_writes_per_day", SIZE, reread=True)
    )
    drain_ns: int = field(default=60 * SECOND_NS, metadata=_key("drain", WAIT, reread=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class LogConfig:
    """`[log]`. `file` None: standard error."""

    format: LogFormat = field(default="human", metadata=_key("format", one_of("human", "json")))
    level: LogLevel = field(
        default="info",
        metadata=_key("level", one_of("debug", "info", "warning", "error"), reread=True),
    )
    file: Path | None = field(default=None, metadata=_key("file", PATH))


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterConfig:
    """`[cluster]`: other hosts. `id` None: this daemon is alone.

    `name` None: the host's. `weight_bytes` None: what the tiers here hold. `advertise` None: the
    name and the port of `listen`. Of `members` and `etcd` one at most is given. `fsync`: whose
    copies it waits for, `replicas` for at most `fsync_deadline_ns`.
    """

    id: str | None = field(default=None, metadata=_key("id", HOSTNAME))
    name: str | None = field(default=None, metadata=_key("name", HOSTNAME))
    zone: str = field(default=ZONE_DEFAULT, metadata=_key("zone", ZONE))
    weight_bytes: int | None = field(default=None, metadata=_key("weight", SIZE))
    listen: str = field(default="0.0.0.0:7440", metadata=_key("listen", ADDRESS))
    advertise: str | None = field(default=None, metadata=_key("advertise", ADDRESS))
    members: tuple[ListedMember, ...] = field(default=(), metadata=_key("members", MEMBERS))
    etcd: tuple[str, ...] = field(default=(), metadata=_key("etcd", URLS))
    etcd_user: str | None = field(default=None, metadata=_key("etcd_user", NAME))
    etcd_password_file: Path | None = field(default=None, metadata=_key("etcd_password_file", PATH))
    etcd_ca: Path | None = field(default=None, metadata=_key("etcd_ca", PATH))
    etcd_cert: Path | None = field(default=None, metadata=_key("etcd_cert", PATH))
    etcd_key: Path | None = field(default=None, metadata=_key("etcd_key", PATH))
    etcd_deadline_ns: int = field(default=3 * SECOND_NS, metadata=_key("etcd_deadline", WAIT))
    lease_ns: int = field(default=10 * SECOND_NS, metadata=_key("lease", WAIT))
    absent_wait_ns: int = field(default=5 * MINUTE_NS, metadata=_key("absent_wait", WAIT))
    ca: Path | None = field(default=None, metadata=_key("ca", PATH))
    cert: Path | None = field(default=None, metadata=_key("cert", PATH))
    key: Path | None = field(default=None, metadata=_key("key", PATH))
    insecure: bool = field(default=False, metadata=_key("insecure", FLAG))
    replicas: int = field(default=2, metadata=_key("replicas", COUNT, reread=True))
    fsync: Fsync = field(
        default="local", metadata=_key("fsync", one_of("local", "replicas"), reread=True)
    )
    fsync_deadline_ns: int = field(
        default=10 * SECOND_NS, metadata=_key("fsync_deadline", WAIT, reread=True)
    )
    connections: int = field(default=4, metadata=_key("connections", COUNT))
    peer_deadline_ns: int = field(
        default=SECOND_NS, metadata=_key("peer_deadline", WAIT, reread=True)
    )
    peer_bytes_per_s: int = field(default=16 * MIB, metadata=_key("peer_rate", SIZE, reread=True))
    hedge_ns: int = field(default=20 * MILLISECOND_NS, metadata=_key("hedge", WAIT, reread=True))
    missing_keep_ns: int = field(
        default=500 * MILLISECOND_NS, metadata=_key("missing_keep", WAIT, reread=True)
    )
    tombstone_keep_ns: int = field(
        default=DAY_NS, metadata=_key("tombstone_keep", WAIT, reread=True)
    )
    repair_bytes_per_s: int = field(
        default=64 * MIB, metadata=_key("repair_rate", SIZE, reread=True)
    )


@dataclass(frozen=True, slots=True)
class Override:
    """A value given by a flag: it beats the file's. `table` "" is the top level.

    With `table` "cold", an empty `key` replaces the list of devices (`value` is a list of their
    tables), and another key is set on each.
    """

    flag: str
    table: str
    key: str
    value: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Everything the daemon is told. Paths are absolute where `load` made it."""

    state: Path = field(metadata=_key("state", PATH))
    hot: HotConfig
    mount: MountConfig = field(default_factory=MountConfig)
    warm: WarmConfig = field(default_factory=WarmConfig)
    codec: CodecConfig = field(default_factory=CodecConfig)
    cold: tuple[ColdConfig, ...] = ()
    defaults: DefaultsConfig = field(default_factory=DefaultsConfig)
    limits: Limits = field(default_factory=Limits)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    log: LogConfig = field(default_factory=LogConfig)
    source: Path | None = None
    overrides: tuple[Override, ...] = field(default=(), repr=False, compare=False)

    def as_dict(self) -> dict[str, Any]:
        """The shape of the file, with sizes and durations as people write them."""
        written: dict[str, Any] = dict(_written(self))
        for name in SINGLE_TABLES:
            written[name] = dict(_written(getattr(self, name)))
        written["cold"] = [dict(_written(device)) for device in self.cold]
        return written

    def as_toml(self) -> str:
        """A file that `load` reads back as this configuration."""
        written = self.as_dict()
        lines = [f"# read from {_comment(str(self.source))}"] if self.source else []
        lines += [f"state = {_toml(written['state'])}"]
        for name in SINGLE_TABLES:
            lines += ["", f"[{name}]", *_assignments(written[name])]
        for device in written["cold"]:
            lines += ["", "[[cold]]", *_assignments(device)]
        return "\n".join(lines) + "\n"


SINGLE_TABLES: dict[str, type] = {
    "mount": MountConfig,
    "hot": HotConfig,
    "warm": WarmConfig,
    "codec": CodecConfig,
    "defaults": DefaultsConfig,
    "limits": Limits,
    "cluster": ClusterConfig,
    "log": LogConfig,
}
TABLES: dict[str, type] = {**SINGLE_TABLES, "cold": ColdConfig}


def _written(table: object) -> Iterator[tuple[str, TomlValue]]:
    for name, setting in settings_of(type(table)):
        value = setting.kind.write(getattr(table, name))
        if value is not None:
            yield setting.key, value


def _assignments(table: dict[str, TomlValue]) -> list[str]:
    return [f"{key} = {_toml(value)}" for key, value in table.items()]


def _toml(value: TomlValue) -> str:
    if not isinstance(value, str):
        return json.dumps(value)
    # JSON's escapes are TOML's, but for DEL; and a path of odd bytes has no spelling in TOML.
    text = value.encode("utf-8", "replace").decode()
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _comment(text: str) -> str:
    return re.sub(r"[^ -~]", "?", text)
