"""How configured values must relate to each other, to the machine and to this version."""

import os
from collections.abc import Iterator
from pathlib import Path

from ctxfs.settings import Config, HotConfig, Limits
from ctxfs.units import GIB, KIB, MIB, SECOND_NS, format_duration, format_size

HOT_BYTES_MIN = 8 * MIB
WARM_BYTES_MIN = 4 * MIB
COLD_BYTES_MIN = 16 * MIB
LEVEL_MAX = 19  # of zstd; higher ones take memory that nobody asked for
BLOCK_BYTES_MAX_MIN = 4 * KIB
ATTRIBUTES_BYTES_MAX_MAX = 64 * KIB  # what the kernel takes for one list of attributes
EVENTS_KEPT_MAX = 1_000_000


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


def _broken_codec(config: Config) -> Iterator[Relation]:
    codec = config.codec
    if not 1 <= codec.level <= LEVEL_MAX:
        yield ("codec.level",), f"must be from 1 to {LEVEL_MAX}"
    if codec.key_file is not None and codec.keyring is not None:
        yield ("codec.key_file", "codec.keyring"), "keys come from one place; leave one of them out"
    if config.warm.size_bytes and codec.compress == "never":
        yield ("warm.size", "codec.compress"), "nothing would come into it without compression"


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
