"""What the daemon says of itself: `.ctx/stats` as JSON, `.ctx/metrics` for Prometheus."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import ctxfs
from ctxfs.core.times import Now
from ctxfs.store.catalog import Catalog
from ctxfs.store.events import utc_text
from ctxfs.tiers.cold import ColdStatistics
from mountd import child
from mountd.channels import ChosenChannel
from mountd.deadlines import Deadlines
from mountd.devices import Devices

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Statistics:
    """Gathers numbers when asked; keeps none of its own."""

    def __init__(
        self,
        catalog: Catalog,
        *,
        mount: str,
        state: str,
        channel: ChosenChannel,
        deadlines: Deadlines,
        devices: Devices,
        device_work: Callable[[], list[dict[str, Any]]],
        cluster: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        """`cluster`: what there is to tell of other hosts, if there may be any."""
        self._catalog = catalog
        self._devices = devices
        self._device_work = device_work
        self._cluster = cluster
        self._facts = {"mount": mount, "state_dir": state}
        self._channel = channel
        self._deadlines = deadlines
        self._started: Now = catalog.clock()

    def as_dict(self) -> dict[str, Any]:
        """Return everything, by the names of ctxfs(7)."""
        catalog = self._catalog
        now = catalog.clock()
        return {
            "version": ctxfs.__version__,
            "pid": os.getpid(),
            "parent_pid": child.parent_pid(),
            "restarts": child.restarts(),
            **self._facts,
            "channel": self._channel.name,
            "channel_why": self._channel.why,
            "passthrough": self._channel.passthrough,
            "uptime_s": round((now.boot_ns - self._started.boot_ns) / 1e9, 3),
            "started_at": utc_text(self._started.wall_ns),
            "blocks": {
                "total": catalog.block_count,
                "sealed": catalog.block_count - catalog.writing_count,
                "writing": catalog.writing_count,
                "directories": catalog.names.directory_count,
            },
            "tiers": self._tiers(now),
            "requests": self._deadlines.statistics(),
            "counters": dataclasses.asdict(catalog.counters),
            "cluster": None if self._cluster is None else self._cluster(),
            "memory": {"rss_bytes": rss_bytes()},
        }

    def _tiers(self, now: Now) -> dict[str, Any]:
        catalog = self._catalog
        with_extras = catalog.names.table.peek_with_extras()
        pinned = sum(
            block.hot_bytes
            for block in with_extras
            if block in catalog.hot_order and block.is_pinned(now.boot_ns)
        )
        tiers: dict[str, Any] = {
            "hot": {
                "capacity_bytes": catalog.hot.capacity_bytes,
                "used_bytes": catalog.hot.used_bytes,
                "reserved_bytes": catalog.hot.reserved_bytes,
                "spare_bytes": catalog.hot.spares.physical_bytes,
                "blocks": len(catalog.hot_order),
                "pinned_bytes": pinned,
                "huge_pages": catalog.hot.huge,
            }
        }
        if catalog.warm is not None:
            tiers["warm"] = {
                "capacity_bytes": catalog.warm.capacity_bytes,
                "used_bytes": catalog.warm.used_bytes,
                "content_bytes": catalog.warm_content_bytes,
                "blocks": len(catalog.warm_order),
            }
        if catalog.cold is not None:
            why = self._devices.why_not_uring
            devices = [self._device(device, why) for device in catalog.cold.statistics()]
            tiers["cold"] = {
                "capacity_bytes": sum(d["capacity_bytes"] for d in devices),
                "live_bytes": sum(d["live_bytes"] for d in devices),
                "used_bytes": sum(d["live_bytes"] for d in devices),
                "blocks": len(catalog.cold_order),
                "dedup": {
                    "blocks": sum(d["aliases"] for d in devices),
                    "saved_bytes": sum(d["saved_bytes"] for d in devices),
                },
                "devices": devices,
                "device_work": self._device_work(),
            }
        return tiers

    def _device(self, device: ColdStatistics, why: Mapping[str, str]) -> dict[str, Any]:
        facts = dataclasses.asdict(device)
        facts["segments_free"] = facts.pop("free_segments")
        put = device.put_bytes
        facts["written_per_put_byte"] = round(device.written_bytes / put, 3) if put else None
        return facts | {"engine_why": why.get(device.path)}

    def as_json(self) -> bytes:
        """Return `.ctx/stats`."""
        return json.dumps(self.as_dict(), indent=2).encode() + b"\n"

    def as_metrics(self) -> bytes:
        """Return `.ctx/metrics`, in Prometheus' text format."""
        return "\n".join(_metrics(self.as_dict())).encode() + b"\n"


COLD_MEASURES = (
    "live_bytes", "free_bytes", "saved_bytes", "put_bytes", "written_bytes", "read_bytes", "errors",
)  # fmt: skip


def _metrics(stats: dict[str, Any]) -> Iterator[str]:
    blocks, tiers = stats["blocks"], stats["tiers"]
    devices = {device["path"]: device for device in tiers.get("cold", {}).get("devices", ())}
    yield from _family("uptime_seconds", "gauge", {"": stats["uptime_s"]})
    yield from _family("restarts_total", "counter", {"": stats["restarts"]})
    yield from _family("memory_rss_bytes", "gauge", {"": stats["memory"]["rss_bytes"]})
    states = {_label("state", state): blocks[state] for state in ("sealed", "writing")}
    yield from _family("blocks", "gauge", states)
    yield from _family("directories", "gauge", {"": blocks["directories"]})
    yield from _family("requests_waiting", "gauge", {"": stats["requests"]["waiting"]})
    yield from _family("requests_longest_seconds", "gauge", {"": stats["requests"]["longest_s"]})
    for name, value in stats["counters"].items():
        yield from _family(f"{name}_total", "counter", {"": value})
    if stats["cluster"] is not None:
        yield from _cluster_metrics(stats["cluster"])
    for measure in ("capacity_bytes", "used_bytes", "blocks"):
        samples = {_label("tier", tier): facts[measure] for tier, facts in tiers.items()}
        yield from _family(f"tier_{measure}", "gauge", samples)
    for measure in COLD_MEASURES:
        samples = {_label("path", path): device[measure] for path, device in devices.items()}
        is_gauge = measure in ("live_bytes", "free_bytes", "saved_bytes")
        name = f"cold_{measure}" if is_gauge else f"cold_{measure}_total"
        yield from _family(name, "gauge" if is_gauge else "counter", samples)


CLUSTER_GAUGES = (
    "members", "members_healthy", "waiting", "amends_waiting", "tombstones", "elsewhere",
)  # fmt: skip


def _cluster_metrics(cluster: dict[str, Any]) -> Iterator[str]:
    for name in CLUSTER_GAUGES:
        if name in cluster:
            yield from _family(f"cluster_{name}", "gauge", {"": cluster[name]})
    if cluster["source_reachable"] is not None:
        up = int(cluster["source_reachable"])
        yield from _family("cluster_source_up", "gauge", {_label("source", cluster["source"]): up})
    for name, value in cluster["counters"].items():
        yield from _family(f"cluster_{name}_total", "counter", {"": value})


def _family(name: str, kind: str, samples: Mapping[str, float]) -> Iterator[str]:
    """One metric: its type, then a line for each set of labels."""
    if samples:
        yield f"# TYPE ctxfs_{name} {kind}"
    for labels, value in samples.items():
        yield f"ctxfs_{name}{labels} {value}"


def _label(name: str, value: str) -> str:
    """Prometheus knows three escapes and takes everything else as UTF-8."""
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'{{{name}="{escaped}"}}'


def rss_bytes() -> int:
    """Return the resident memory of this process, without the hot tier's shared pages."""
    with open("/proc/self/statm", "rb") as file:
        words = file.read().split()
    return (int(words[1]) - int(words[2])) * PAGE_BYTES
