"""What the daemon says of itself: `.ctx/stats` as JSON, `.ctx/metrics` for Prometheus."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

import ctxfs
from ctxfs.core.times import Now
from ctxfs.store.catalog import Catalog
from ctxfs.store.events import utc_text
from ctxfs.tiers.cold import ColdStatistics
from mountd.channels import ChosenChannel

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
        why_not_uring: Mapping[str, str],
    ) -> None:
        self._catalog = catalog
        self._why_not_uring = why_not_uring  # by path of the device
        self._facts = {"mount": mount, "state_dir": state}
        self._channel = channel
        self._started: Now = catalog.clock()

    def as_dict(self) -> dict[str, Any]:
        """Return everything, by the names of ctxfs(7)."""
        catalog = self._catalog
        now = catalog.clock()
        return {
            "version": ctxfs.__version__,
            "pid": os.getpid(),
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
            "counters": dataclasses.asdict(catalog.counters),
            "memory": {"rss_bytes": rss_bytes()},
        }

    def _tiers(self, now: Now) -> dict[str, Any]:
        catalog = self._catalog
        hot_blocks = catalog.hot_order.leaving()
        pinned = sum(block.hot_bytes for block in hot_blocks if block.is_pinned(now.boot_ns))
        tiers: dict[str, Any] = {
            "hot": {
                "capacity_bytes": catalog.hot.capacity_bytes,
                "used_bytes": catalog.hot.used_bytes,
                "reserved_bytes": catalog.hot.reserved_bytes,
                "blocks": len(catalog.hot_order),
                "pinned_bytes": pinned,
                "huge_pages": catalog.hot.huge,
            }
        }
        if catalog.cold is not None:
            devices = [self._device(device) for device in catalog.cold.statistics()]
            tiers["cold"] = {
                "capacity_bytes": sum(d["capacity_bytes"] for d in devices),
                "live_bytes": sum(d["live_bytes"] for d in devices),
                "used_bytes": sum(d["live_bytes"] for d in devices),
                "blocks": len(catalog.cold_order),
                "devices": devices,
            }
        return tiers

    def _device(self, device: ColdStatistics) -> dict[str, Any]:
        facts = dataclasses.asdict(device)
        facts["segments_free"] = facts.pop("free_segments")
        return facts | {"engine_why": self._why_not_uring.get(device.path)}

    def as_json(self) -> bytes:
        """Return `.ctx/stats`."""
        return json.dumps(self.as_dict(), indent=2).encode() + b"\n"

    def as_metrics(self) -> bytes:
        """Return `.ctx/metrics`, in Prometheus' text format."""
        return "\n".join(_metrics(self.as_dict())).encode() + b"\n"


def _metrics(stats: dict[str, Any]) -> Iterator[str]:
    def line(name: str, kind: str, value: float, **labels: str) -> Iterator[str]:
        yield f"# TYPE ctxfs_{name} {kind}"
        marks = ",".join(f"{k}={json.dumps(v)}" for k, v in labels.items())
        yield f"ctxfs_{name}{{{marks}}} {value}" if marks else f"ctxfs_{name} {value}"

    yield from line("uptime_seconds", "gauge", stats["uptime_s"])
    yield from line("memory_rss_bytes", "gauge", stats["memory"]["rss_bytes"])
    for name, value in stats["blocks"].items():
        yield from line(f"blocks_{name}", "gauge", value)
    for name, value in stats["counters"].items():
        yield from line(f"{name}_total", "counter", value)
    for measure in ("capacity_bytes", "used_bytes", "blocks"):
        yield f"# TYPE ctxfs_tier_{measure} gauge"
        for tier, facts in stats["tiers"].items():
            yield f'ctxfs_tier_{measure}{{tier="{tier}"}} {facts[measure]}'
    devices = stats["tiers"].get("cold", {}).get("devices", [])
    for measure in ("live_bytes", "free_bytes", "written_bytes", "read_bytes", "errors"):
        if devices:
            kind = "gauge" if measure in ("live_bytes", "free_bytes") else "counter"
            yield f"# TYPE ctxfs_cold_{measure} {kind}"
        for device in devices:
            yield f"ctxfs_cold_{measure}{{path={json.dumps(device['path'])}}} {device[measure]}"


def rss_bytes() -> int:
    """Return the resident memory of this process, without the hot tier's shared pages."""
    with open("/proc/self/statm", "rb") as file:
        words = file.read().split()
    return (int(words[1]) - int(words[2])) * PAGE_BYTES
