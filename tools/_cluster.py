"""How a mount's cluster fares: the checks of `ctx doctor` that ask the daemon for its peers."""

import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from ._machine import FAIL, OK, WARN, Check
from ._output import escape, short_duration

SOON_S = 14 * 86400.0  # before a certificate ends
CLOCK_S = 60.0  # clocks that differ by more are wrong; by an hour, nothing is taken any more
CLOCK_REFUSED_S = 3600.0


def checks(
    point: str, told: dict[str, Any] | None, stats: dict[str, Any], now_s: float | None = None
) -> Iterator[Check]:
    """`told`: `.ctx/peers`; None where it did not come. `stats`: what `.ctx/stats` says of it."""
    name = f"cluster {point}"
    if told is None:
        yield Check(name, WARN, "its members are not told", "ask again; see the daemon's log")
        return
    if not stats["shares"]:
        remedy = "etcd has to answer once: see below, and `ctx peers`"
        yield Check(name, FAIL, "no slot yet: nothing is shared", remedy)
    yield source_check(name, told["source"])
    yield from certificate_checks(told.get("certificates"), time.time() if now_s is None else now_s)
    others = [member for member in told["members"] if not member["self"]]
    for member in others:
        yield from member_checks(member, told.get("protocol"))
    if missing := stats["counters"].get("fsync_missing", 0):
        yield Check(
            f"fsync {point}",
            WARN,
            f"{missing} calls ended without all replicas",
            "the log names the members; are there as many as `replicas` says?",
        )


def source_check(name: str, source: dict[str, Any]) -> Check:
    """Whether it is known who there is."""
    if source["kind"] != "etcd":
        words = {"list": "by the list in the configuration", "none": "alone"}
        return Check(name, OK, words[source["kind"]])
    if source["reachable"]:
        return Check(name, OK, f"etcd answers since {source['since']}")
    since = f" since {source['since']}" if source["since"] else ""
    return Check(
        name,
        WARN,
        f"no use of etcd{since}: {escape(source['why'] or 'not asked yet')}",
        "mend that; until then the members last known go on, and who comes or goes is not noticed",
    )


def certificate_checks(told: dict[str, Any] | None, now_s: float) -> Iterator[Check]:
    """When this member's certificates end."""
    if told is None:
        return
    remedy = "make another and put it there: the daemon reads it by itself"
    for path, end in told["ends"].items():
        name = f"certificate {escape(path)}"
        if end is None:
            yield Check(name, FAIL, "cannot be read", "new connections use what was there before")
            continue
        left_s = datetime.fromisoformat(end).timestamp() - now_s
        if left_s <= 0:
            yield Check(name, FAIL, f"ended at {end}: no new connections", remedy)
        elif left_s < SOON_S:
            yield Check(name, WARN, f"ends in {short_duration(left_s)}, at {end}", remedy)
        else:
            yield Check(name, OK, f"good until {end}")
    if told["trouble"]:
        text = f"not used as they are: {escape(told['trouble'])}"
        yield Check("certificates", WARN, text, "certificate and key have to belong together")


def member_checks(member: dict[str, Any], protocol: str | None) -> Iterator[Check]:
    """How another member fares, as seen from here."""
    name, peer = f"member {escape(member['name'])}", member["peer"] or {}
    trouble = peer.get("trouble") or ""
    if member["state"] != "live":
        text = f"{member['state']} for {short_duration(member['away_s'])}"
        text += f": {escape(trouble)}" if trouble else ""
        remedy = "start it; meanwhile what it held is copied from others"
        yield Check(name, WARN, text, _mending(trouble) or remedy)
    elif peer.get("health") != "healthy":
        why = escape(trouble or "it does not answer in time")
        text = f"{peer.get('health', 'not connected')} for {short_duration(peer.get('ill_for_s'))}"
        remedy = f"is {escape(member['address'])} reached from here, and the daemon there alive?"
        yield Check(name, WARN, f"{text}: {why}", _mending(trouble) or remedy)
    else:
        yield Check(name, OK, "answers")
    spoken = peer.get("protocol")
    if spoken is not None and protocol is not None and spoken != protocol:
        text = f"speaks protocol {spoken}, this one {protocol}"
        yield Check(name, WARN, text, "upgrade what is older: features wait for it")
    if peer.get("corrupt"):
        remedy = "`ctx verify --all` there, and look at its memory and drives"
        yield Check(name, WARN, f"gave wrong bytes {peer['corrupt']} times", remedy)
    ahead_s = peer.get("clock_ahead_s") or 0.0
    if abs(ahead_s) > CLOCK_S:
        side = "ahead" if ahead_s > 0 else "behind"
        state = FAIL if abs(ahead_s) > CLOCK_REFUSED_S else WARN
        text = f"its clock is {short_duration(abs(ahead_s))} {side}"
        yield Check(name, state, text, "set both by NTP: beyond an hour, blocks are refused")


def _mending(trouble: str) -> str | None:
    """What to do where two members meet and do not get on; None: they may not have met at all."""
    said = trouble.lower()
    if "cluster" in said:
        return "`[cluster] id` has to be the same on both"
    if "certificate" in said or "ssl" in said or "unknown ca" in said:
        return "`ca` the same on both, a `cert` that is for the member's `name`, and not over?"
    if "reset" in said or "protocol" in said:
        return "have both certificates, or both `insecure = true`? Else see the log there"
    return None
