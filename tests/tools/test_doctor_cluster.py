"""`ctx doctor` on a cluster: what is said of etcd, certificates and other members."""

import copy
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from tools import _cluster
from tools._machine import Check

NOW_S = datetime(2026, 6, 1, tzinfo=UTC).timestamp()
PEER: dict[str, Any] = {
    "health": "healthy",
    "ill_for_s": 0.0,
    "trouble": None,
    "protocol": "1.1",
    "corrupt": 0,
    "clock_ahead_s": 0.002,
}
TOLD: dict[str, Any] = {
    "protocol": "1.1",
    "certificates": {
        "ends": {"/etc/ca.pem": "2030-01-01T00:00:00+00:00"},
        "trouble": None,
    },
    "source": {"kind": "etcd", "reachable": True, "since": "then", "why": None},
    "members": [
        {"name": "node1", "self": True, "state": "live", "peer": None},
        {
            "name": "node2",
            "self": False,
            "state": "live",
            "away_s": None,
            "address": "10.0.0.2:7440",
            "peer": PEER,
        },
    ],
}
STATS: dict[str, Any] = {"shares": True, "counters": {"fsync_missing": 0}}


def found(change: Callable[[dict[str, Any], dict[str, Any]], object]) -> list[Check]:
    """What is not ok after a change of what the daemon tells."""
    told, stats = copy.deepcopy(TOLD), copy.deepcopy(STATS)
    change(told, stats)
    checks = _cluster.checks("/ctx", told, stats, NOW_S)
    return [check for check in checks if check.state != "ok"]


def test_a_cluster_that_fares_well_has_a_line_for_each_thing() -> None:
    checks = list(_cluster.checks("/ctx", TOLD, STATS, NOW_S))
    assert {check.state for check in checks} == {"ok"}
    assert [check.name for check in checks] == [
        "cluster /ctx",
        "certificate /etc/ca.pem",
        "member node2",
    ]


def ends(at: str | None) -> Callable[[dict[str, Any], dict[str, Any]], object]:
    return lambda told, _: told["certificates"]["ends"].update({"/etc/ca.pem": at})


def peer(**facts: Any) -> Callable[[dict[str, Any], dict[str, Any]], object]:
    return lambda told, _: told["members"][1]["peer"].update(facts)


def away(told: dict[str, Any], stats: dict[str, Any]) -> None:
    told["source"].update(reachable=False, why="http://a: Connection refused")


@pytest.mark.parametrize(
    ("change", "state", "text"),
    [
        (away, "warn", "no use of etcd since then: http://a: Connection refused"),
        (ends("2026-05-31T00:00:00+00:00"), "fail", "ended at 2026-05-31T00:00:00+00:00"),
        (ends("2026-06-03T00:00:00+00:00"), "warn", "ends in 2d"),
        (ends(None), "fail", "cannot be read"),
        (
            lambda told, _: told["certificates"].update(trouble="no match"),
            "warn",
            "not used as they are: no match",
        ),
        (
            lambda told, _: told["members"][1].update(state="suspect", away_s=70.0),
            "warn",
            "suspect for 1m10s",
        ),
        (
            peer(health="broken", ill_for_s=5.0, trouble="refused"),
            "warn",
            "broken for 5s: refused",
        ),
        (peer(protocol="1.0"), "warn", "speaks protocol 1.0, this one 1.1"),
        (peer(corrupt=2), "warn", "gave wrong bytes 2 times"),
        (peer(clock_ahead_s=-90.0), "warn", "its clock is 1m30s behind"),
        (peer(clock_ahead_s=7200.0), "fail", "its clock is 2h"),
        (lambda _, stats: stats.update(shares=False), "fail", "no slot yet"),
        (
            lambda _, stats: stats["counters"].update(fsync_missing=3),
            "warn",
            "3 calls ended without all replicas",
        ),
    ],
)
def test_what_is_wrong_is_told_with_something_to_do(
    change: Callable[[dict[str, Any], dict[str, Any]], object], state: str, text: str
) -> None:
    (check,) = found(change)
    assert (check.state, check.text.startswith(text)) == (state, True), check
    assert check.remedy


@pytest.mark.parametrize(
    ("trouble", "remedy"),
    [
        ("the connection broke: ECONNREFUSED", "reached from here"),
        ("b'b' says: this is a member of another cluster", "[cluster] id"),
        ("[SSL: TLSV1_ALERT_UNKNOWN_CA] tlsv1 alert unknown ca (_ssl.c:2580)", "`ca`"),
        ("the certificate is for (b'c',), not for b'b'", "`cert`"),
        ("the connection broke: Connection reset by peer", "insecure"),
    ],
)
def test_what_is_to_be_done_about_a_member_depends_on_what_is_wrong(
    trouble: str, remedy: str
) -> None:
    (broken,) = found(peer(health="broken", ill_for_s=5.0, trouble=trouble))
    assert remedy in broken.remedy

    def suspect(told: dict[str, Any], _: dict[str, Any]) -> None:
        told["members"][1].update(state="suspect", away_s=7.0)
        told["members"][1]["peer"].update(health="broken", trouble=trouble)

    (away,) = found(suspect)
    assert away.text == f"suspect for 7s: {trouble}"
    assert remedy in away.remedy or "start it" in away.remedy


def test_members_that_are_not_told_are_no_reason_to_fail() -> None:
    (check,) = _cluster.checks("/ctx", None, STATS)
    assert check.state == "warn"
