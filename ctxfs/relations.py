"""How configured values must relate to each other, to the machine and to this version."""

import os
from collections.abc import Iterator
from pathlib import Path

from ctxfs.addresses import slot_of
from ctxfs.settings import ClusterConfig, Config, HotConfig, Limits
from ctxfs.units import GIB, KIB, MIB, SECOND_NS, format_duration, format_size

HOT_BYTES_MIN = 8 * MIB
WARM_BYTES_MIN = 4 * MIB
COLD_BYTES_MIN = 16 * MIB
LEVEL_MAX = 19  # of zstd; higher ones take memory that nobody asked for
BLOCK_BYTES_MAX_MIN = 4 * KIB
ATTRIBUTES_BYTES_MAX_MAX = 64 * KIB  # what the kernel takes for one list of attributes
EVENTS_KEPT_MAX = 1_000_000
REPLICAS_MAX = 16
CONNECTIONS_MAX = 64
LEASE_NS_MIN = SECOND_NS  # etcd counts in seconds
REPAIR_BYTES_MIN = MIB
PEER_BYTES_MIN = 64 * KIB


def default_hot_bytes(memory_bytes: int) -> int:
    """The bounded default: a quarter of the memory, at most 8 GiB, in whole MiB."""
    return max(HOT_BYTES_MIN, min(8 * GIB, memory_bytes // 4 // MIB * MIB))


def default_block_bytes_max(hot_bytes: int) -> int:
    """While it is written, a block lies in the hot tier whole: none can be larger."""
    return min(16 * GIB, hot_bytes)


def default_operation_deadline_ns(hot: HotConfig, limits: Limits) -> int:
    """Two minutes, or twice what a request may wait for room or for a tier, if that is longer."""
    return max(120 * SECOND_NS, 2 * hot.room_wait_ns, 2 * limits.read_deadline_ns)


Relation = tuple[tuple[str, ...], str]


def broken_relations(config: Config, memory_bytes: int) -> Iterator[Relation]:
    """The keys involved, the one to mend first, and what is wrong with their values."""
    yield from _broken_sizes(config, memory_bytes)
    yield from _broken_paths(config)
    yield from _broken_codec(config)
    yield from _broken_cluster(config.cluster)
    if not 0 < config.hot.low_ratio < config.hot.high_ratio <= 1:
        yield ("hot.low", "hot.high"), "0 < low < high <= 1 must hold"
    if config.defaults.ttl_ns == 0:
        yield ("defaults.ttl",), "a block would expire at once; write none for no limit"
    if config.limits.read_deadline_ns == 0:
        yield ("limits.read_deadline",), "nothing answers in no time; write at least 1ms"
    for key, wait_ns in (
        ("hot.room_wait", config.hot.room_wait_ns),
        ("limits.read_deadline", config.limits.read_deadline_ns),
    ):
        if config.limits.operation_deadline_ns <= wait_ns:
            text = f"must be longer than {key}, {format_duration(wait_ns)}"
            yield ("limits.operation_deadline", key), text
    if config.cluster.fsync_deadline_ns >= config.limits.operation_deadline_ns and (
        config.cluster.id is not None and config.cluster.fsync == "replicas"
    ):
        limit = format_duration(config.limits.operation_deadline_ns)
        text = f"must be shorter than limits.operation_deadline, {limit}"
        yield ("cluster.fsync_deadline", "limits.operation_deadline"), text


def _broken_codec(config: Config) -> Iterator[Relation]:
    codec = config.codec
    if not 1 <= codec.level <= LEVEL_MAX:
        yield ("codec.level",), f"must be from 1 to {LEVEL_MAX}"
    if codec.key_file is not None and codec.keyring is not None:
        yield ("codec.key_file", "codec.keyring"), "keys come from one place; leave one of them out"
    if config.warm.size_bytes and codec.compress == "never":
        yield ("warm.size", "codec.compress"), "nothing would come into it without compression"


def _broken_cluster(cluster: ClusterConfig) -> Iterator[Relation]:
    if not 1 <= cluster.replicas <= REPLICAS_MAX:
        yield ("cluster.replicas",), f"must be from 1 to {REPLICAS_MAX}"
    if not 1 <= cluster.connections <= CONNECTIONS_MAX:
        yield ("cluster.connections",), f"must be from 1 to {CONNECTIONS_MAX}"
    if cluster.weight_bytes == 0:
        yield ("cluster.weight",), "would be home to nothing; leave it out for what is here"
    if cluster.repair_bytes_per_s < REPAIR_BYTES_MIN:
        yield ("cluster.repair_rate",), f"must be at least {format_size(REPAIR_BYTES_MIN)}"
    if cluster.peer_bytes_per_s < PEER_BYTES_MIN:
        yield ("cluster.peer_rate",), f"must be at least {format_size(PEER_BYTES_MIN)}"
    if cluster.peer_deadline_ns and not 0 < cluster.hedge_ns < cluster.peer_deadline_ns:
        text = "must be above 0 and below cluster.peer_deadline, or nobody else is asked in time"
        yield ("cluster.hedge", "cluster.peer_deadline"), text
    if cluster.lease_ns < LEASE_NS_MIN:
        yield ("cluster.lease",), f"must be at least {format_duration(LEASE_NS_MIN)}"
    for key, wait_ns in (
        ("cluster.peer_deadline", cluster.peer_deadline_ns),
        ("cluster.fsync_deadline", cluster.fsync_deadline_ns),
        ("cluster.etcd_deadline", cluster.etcd_deadline_ns),
    ):
        if wait_ns == 0:
            yield (key,), "nothing answers in no time; write at least 1ms"
    if cluster.tombstone_keep_ns <= cluster.absent_wait_ns:
        text = "must be longer than cluster.absent_wait, so that who is away is told in full"
        yield ("cluster.tombstone_keep", "cluster.absent_wait"), text
    yield from _broken_sources(cluster)
    yield from _broken_security(cluster)


def _broken_sources(cluster: ClusterConfig) -> Iterator[Relation]:
    if cluster.members and cluster.etcd:
        yield ("cluster.members", "cluster.etcd"), "who is there is told by one of them only"
    if cluster.id is None:
        for key, given in (("cluster.members", cluster.members), ("cluster.etcd", cluster.etcd)):
            if given:
                yield (key, "cluster.id"), "needs cluster.id, which is the same on all hosts"
    for what in ("name", "address"):
        seen = [getattr(member, what) for member in cluster.members]
        for twice in sorted({each for each in seen if seen.count(each) > 1}):
            yield ("cluster.members",), f"{twice} is named twice"
    slots: dict[int, str] = {}
    for member in cluster.members:
        other = slots.setdefault(slot_of(member), member.name)
        if other != member.name:
            text = f"{other} and {member.name} would both have slot {slot_of(member)}: "
            yield (
                ("cluster.members",),
                text + "give one of them another, as in NAME=HOST:PORT,slot=5",
            )
    names = [member.name for member in cluster.members]
    if names and cluster.name is not None and cluster.name not in names:
        yield ("cluster.members", "cluster.name"), f"{cluster.name} is not among them"


def _broken_security(cluster: ClusterConfig) -> Iterator[Relation]:
    files = (("ca", cluster.ca), ("cert", cluster.cert), ("key", cluster.key))
    missing = [f"cluster.{key}" for key, path in files if path is None]
    given = [f"cluster.{key}" for key, path in files if path is not None]
    if given and missing:
        yield (given[0],), f"needs {' and '.join(missing)} too"
    if given and cluster.insecure:
        yield ("cluster.insecure", given[0]), "peers either show certificates, or they do not"
    if (cluster.members or cluster.etcd) and not given and not cluster.insecure:
        text = "peers are checked by certificates: set ca, cert and key, or insecure = true"
        yield ("cluster.members" if cluster.members else "cluster.etcd", "cluster.ca"), text
    if (cluster.etcd_cert is None) != (cluster.etcd_key is None):
        yield ("cluster.etcd_cert", "cluster.etcd_key"), "a certificate and its key go together"
    if (cluster.etcd_user is None) != (cluster.etcd_password_file is None):
        text = "a user and the file with its password go together"
        yield ("cluster.etcd_user", "cluster.etcd_password_file"), text
    plain = [url for url in cluster.etcd if url.startswith("http:")]
    if plain and cluster.etcd_user is not None and not cluster.insecure:
        text = f"the password would go to {plain[0]} in the open: use https, or insecure = true"
        yield ("cluster.etcd_user", "cluster.etcd"), text


def _broken_sizes(config: Config, memory_bytes: int) -> Iterator[Relation]:
    hot_bytes, limits = config.hot.size_bytes, config.limits
    if hot_bytes > memory_bytes:
        yield ("hot.size",), f"is more than the memory, {format_size(memory_bytes)}"
    elif hot_bytes + config.warm.size_bytes > memory_bytes:
        text = f"together with hot.size is more than the memory, {format_size(memory_bytes)}"
        yield ("warm.size", "hot.size"), text
    if 0 < config.warm.size_bytes < WARM_BYTES_MIN:
        yield ("warm.size",), f"must be 0, or at least {format_size(WARM_BYTES_MIN)}"
    for device in config.cold:
        if device.size_bytes is not None and device.size_bytes < COLD_BYTES_MIN:
            text = f"must be at least {format_size(COLD_BYTES_MIN)} for {device.path}"
            yield ("cold.size", "cold.path"), text
    if hot_bytes < HOT_BYTES_MIN:
        yield ("hot.size",), f"must be at least {format_size(HOT_BYTES_MIN)}"
    elif limits.block_bytes_max < BLOCK_BYTES_MAX_MIN:
        yield ("limits.block_max",), f"must be at least {format_size(BLOCK_BYTES_MAX_MIN)}"
    elif limits.block_bytes_max > hot_bytes:
        text = f"no block can be larger than the hot tier, {format_size(hot_bytes)}"
        yield ("limits.block_max", "hot.size"), text
    if limits.attributes_bytes_max > ATTRIBUTES_BYTES_MAX_MAX:
        text = f"the kernel takes at most {format_size(ATTRIBUTES_BYTES_MAX_MAX)}"
        yield ("limits.attributes_max",), text
    if not 1 <= limits.events_kept <= EVENTS_KEPT_MAX:
        yield ("limits.events_kept",), f"must be from 1 to {EVENTS_KEPT_MAX}"


def _broken_paths(config: Config) -> Iterator[Relation]:
    real = [os.path.realpath(device.path) for device in config.cold]
    for twice in sorted({each for each in real if real.count(each) > 1}):
        yield ("cold.path",), f"{twice} is named twice"
    mount = config.mount.path
    if mount is None:
        return
    beneath: list[tuple[str, Path | None]] = [
        ("state", config.state),
        ("log.file", config.log.file),
    ]
    beneath += [("cold.path", device.path) for device in config.cold]
    for key, path in beneath:
        if path is not None and path.is_relative_to(mount):
            yield (key, "mount.path"), f"{path} would lie beneath the mount itself, {mount}"
