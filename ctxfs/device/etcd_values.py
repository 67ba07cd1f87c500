"""What etcd's HTTP gateway says and is told: values of ours, and the JSON they travel as.

Bytes are base64, 64-bit numbers are strings, and what is 0 or empty is left out. The messages are
those of https://etcd.io/docs/v3.4/dev-guide/api_reference_v3/.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from dataclasses import dataclass
from typing import Any, Final

from ctxfs.errors import EtcdAway, EtcdError, EtcdRefused, HistoryGone, LeaseGone

Json = dict[str, Any]

# google.rpc.Code, as far as etcd uses it.
DENIED: Final = 7
_INVALID, _DEADLINE, _NOT_FOUND, _OUT_OF_RANGE = 3, 4, 5, 11
_UNAVAILABLE, _UNAUTHENTICATED = 14, 16
_STALE_TOKEN: Final = ("invalid auth token", "revision of auth store is old")


@dataclass(frozen=True, slots=True)
class KeyValue:
    """A key as it was at `revision`, that of its last change. Deleted: `value` is None."""

    key: bytes
    value: bytes | None
    revision: int


@dataclass(frozen=True, slots=True)
class Found:
    """All keys of a prefix, and the revision at which they were read."""

    revision: int
    pairs: tuple[KeyValue, ...]


class StaleToken(EtcdRefused):
    """We have to say again who we are."""


def encoded(data: bytes) -> str:
    """Bytes as the gateway takes them."""
    return b64encode(data).decode()


def prefix_end(prefix: bytes) -> bytes:
    """The first key that does not begin with `prefix`, whose last byte is below 255."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


def pair(told: Json, *, deleted: bool = False) -> KeyValue:
    """One `mvccpb.KeyValue`."""
    value = None if deleted else b64decode(told.get("value", ""))
    return KeyValue(b64decode(told["key"]), value, int(told.get("mod_revision", 0)))


def revision_of(told: Json) -> int:
    """The revision in the header of an answer."""
    return int(told.get("header", {}).get("revision", 0))


def put_if(key: bytes, value: bytes, revision: int, lease: int) -> Json:
    """A transaction: put, if the key's last change was at `revision`; else tell what is there.

    Revision 0: if there is no such key.
    """
    compare = {
        "key": encoded(key),
        "target": "MOD",
        "result": "EQUAL",
        "mod_revision": str(revision),
    }
    put = {"key": encoded(key), "value": encoded(value), "lease": str(lease)}
    return {
        "compare": [compare],
        "success": [{"request_put": put}],
        "failure": [{"request_range": {"key": encoded(key)}}],
    }


def parsed(content: bytes) -> Json:
    """An answer. Raises EtcdError for what is none."""
    try:
        answer = json.loads(content)
    except (ValueError, RecursionError):
        raise EtcdError(f"is not etcd, or too old: it answered {content[:80]!r}") from None
    if not isinstance(answer, dict):
        raise EtcdError(f"is not etcd, or too old: it answered {content[:80]!r}")
    return answer


def failure(told: Json, status: int = 500) -> EtcdError:
    """The error that an answer tells: that of a call, or of a stream."""
    if isinstance(told.get("error"), dict):  # a stream's
        told = told["error"]
    text = str(told.get("message") or told.get("error") or f"HTTP status {status}")
    code = int(told.get("code") or told.get("grpc_code") or 0)
    if code == _UNAUTHENTICATED or any(each in text for each in _STALE_TOKEN):
        return StaleToken(text)
    if code == DENIED or (code == _INVALID and ("auth" in text or "user name" in text)):
        return EtcdRefused(text)
    if code == _NOT_FOUND and "lease" in text:
        return LeaseGone(text)
    if code == _OUT_OF_RANGE and "compacted" in text:
        return HistoryGone(text)
    if code in (_UNAVAILABLE, _DEADLINE) or (not code and status >= 500):
        return EtcdAway(text)
    return EtcdError(text)
