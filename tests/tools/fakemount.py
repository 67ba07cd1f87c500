"""A directory that looks like a ctxfs mount to the tools: attributes set by hand, and `.ctx/`."""

import json
import os
from pathlib import Path
from typing import Any

import xxhash

from ctxfs import xattrs

CREATED = "2026-01-02T03:04:05Z"
STATS: dict[str, Any] = {
    "version": "0.1.0",
    "pid": 4242,
    "mount": "/ctx",
    "state_dir": "/var/lib/ctxfs",
    "channel": "pyfuse3",
    "channel_why": "not root",
    "passthrough": False,
    "uptime_s": 100.0,
    "started_at": CREATED,
    "blocks": {"total": 3, "sealed": 2, "writing": 1, "directories": 1},
    "tiers": {
        "hot": {
            "capacity_bytes": 8 << 30,
            "used_bytes": 2 << 30,
            "blocks": 2,
            "pinned_bytes": 1 << 20,
            "huge_pages": True,
        },
        "cold": {
            "capacity_bytes": 100 << 30,
            "live_bytes": 10 << 30,
            "used_bytes": 25 << 30,
            "blocks": 3,
            "devices": [
                {
                    "path": "/var/lib/ctxfs/cold0",
                    "engine": "threads",
                    "engine_why": "the processor lacks avx512f",
                    "state": "ok",
                    "capacity_bytes": 100 << 30,
                    "live_bytes": 10 << 30,
                    "free_bytes": 75 << 30,
                    "segments": 400,
                    "segments_free": 300,
                    "written_bytes": 1 << 40,
                    "read_bytes": 1 << 41,
                    "errors": 0,
                }
            ],
        },
    },
    "counters": {
        "opens": 1000,
        "hits_hot": 600,
        "hits_warm": 0,
        "hits_cold": 200,
        "misses": 200,
        "sealed": 50,
        "read_bytes": 100 << 20,
        "written_bytes": 200 << 20,
        "promoted_bytes": 0,
        "demoted_bytes": 0,
        "evicted": 5,
        "expired": 10,
        "trouble": 0,
        "corrupt": 0,
    },
    "memory": {"rss_bytes": 64 << 20},
}
EVENTS = (
    {
        "time": CREATED,
        "event": "sealed",
        "key": "alpha",
        "generation": 7,
        "size_bytes": 4096,
        "tier": "hot",
    },
    {
        "time": CREATED,
        "event": "moved",
        "key": "be\x1bta",
        "generation": 8,
        "size_bytes": 8192,
        "from": "hot",
        "to": "cold",
    },
)


class FakeMount:
    """A plain directory at `path` with what a daemon would show there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        control = path / ".ctx"
        control.mkdir(parents=True)
        self.write_stats(STATS)
        lines = "".join(json.dumps(event) + "\n" for event in EVENTS)
        (control / "events").write_text(lines)
        (control / "events.recent").write_text(lines)

    def write_stats(self, stats: dict[str, Any]) -> None:
        (self.path / ".ctx" / "stats").write_text(json.dumps(stats))

    def block(self, key: str | bytes, content: bytes = b"kv" * 2048, **story: Any) -> str:
        """Make a sealed block; `story` replaces parts of what the daemon would tell of it."""
        name = os.fsdecode(key)
        path = os.path.join(self.path, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(content)
        told = {
            "key": name,
            "state": "sealed",
            "generation": 7,
            "size_bytes": len(content),
            "stored_bytes": len(content),
            "tier": "hot",
            "copies": ["hot"],
            "ttl_s": None,
            "pin": "0",
            "placement": "auto",
            "parent": "",
            "dtype": "",
            "digest": xxhash.xxh3_128_hexdigest(content),
            "codec": "raw",
            "hits": 0,
            "idle_s": 1.5,
            "created": CREATED,
            "mode": 0o644,
            "uid": 0,
            "gid": 0,
            "open": 0,
            "attributes": {},
        } | story
        os.setxattr(path, xattrs.STORY, json.dumps(told).encode())
        os.setxattr(path, xattrs.TTL, str(told["ttl_s"] or "none").encode())
        return name

    def attribute(self, key: str | bytes, name: bytes) -> bytes | None:
        """What a tool wrote, or None."""
        try:
            return os.getxattr(os.path.join(self.path, os.fsdecode(key)), name)
        except OSError:
            return None
