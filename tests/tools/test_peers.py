"""`ctx peers`: who is there, and how much of that can be relied on."""

import json
from typing import Any

import pytest

from tests.tools.conftest import Run
from tests.tools.fakemount import FakeMount

MEMBER = {
    "name": "node1",
    "self": True,
    "state": "live",
    "away_s": None,
    "zone": "a",
    "slot": 5,
    "weight_bytes": 1 << 40,
    "address": "10.0.0.1:7440",
    "incarnation": 7,
}
AWAY = MEMBER | {
    "name": "node2",
    "self": False,
    "state": "suspect",
    "away_s": 70.0,
    "zone": "b",
    "peer": {
        "health": "broken",
        "round_trip_s": 0.0012,
        "received_bytes": 2 << 20,
        "sent_bytes": 3 << 30,
    },
}
SEEN = ("broken", "1.2ms", "2.0MiB", "3.0GiB")


def tell(mount: FakeMount, **source: Any) -> dict[str, Any]:
    told = {
        "cluster": "prod",
        "self": "node1",
        "slot_claimed": True,
        "epoch": 3,
        "fingerprint": "0",
        "source": {"kind": "etcd", "reachable": True, "since": "then", "why": None} | source,
        "members": [MEMBER, AWAY],
    }
    (mount.path / ".ctx" / "peers").write_text(json.dumps(told))
    return told


def test_members_are_shown_with_state_zone_and_weight(mount: FakeMount, run: Run) -> None:
    tell(mount)
    answer = run("peers")
    assert answer.code == 0
    first, empty, _, *rows = answer.out.splitlines()
    assert first == "cluster prod, by etcd, which answers since then"
    assert empty == ""
    assert [row.split() for row in rows] == [
        ["*", "node1", "live", "-", "a", "1.0TiB", "10.0.0.1:7440"],
        ["node2", "suspect", "1m10s", *SEEN, "b", "1.0TiB", "10.0.0.1:7440"],
    ]


def test_an_etcd_that_is_away_is_told_with_the_reason_and_by_the_exit_code(
    mount: FakeMount, run: Run
) -> None:
    tell(mount, reachable=False, why="http://a: Connection refused")
    answer = run("peers")
    assert answer.code == 5
    assert "AWAY since then: http://a: Connection refused" in answer.out


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ({"kind": "list", "reachable": None}, "by the list in the configuration"),
        ({"kind": "none", "reachable": None}, "alone"),
        ({"reachable": None}, "by etcd, which has not answered yet"),
    ],
)
def test_where_members_are_known_from_is_told(
    mount: FakeMount, run: Run, source: dict[str, Any], shown: str
) -> None:
    tell(mount, **source)
    answer = run("peers")
    assert answer.code == 0
    assert answer.out.startswith(f"cluster prod, {shown}\n")


def test_json_is_what_the_daemon_tells(mount: FakeMount, run: Run) -> None:
    told = tell(mount)
    assert run("peers", "--json").json == told


def test_a_mount_in_no_cluster_says_so(mount: FakeMount, run: Run) -> None:
    source = {"kind": "none", "reachable": None, "since": None, "why": None}
    told: dict[str, Any] = {"cluster": None, "self": None, "source": source, "members": []}
    (mount.path / ".ctx" / "peers").write_text(json.dumps(told))
    answer = run("peers")
    assert (answer.code, answer.out) == (0, "this mount is in no cluster\n")


def test_what_is_no_json_is_told(mount: FakeMount, run: Run) -> None:
    (mount.path / ".ctx" / "peers").write_text("[")
    assert "is no JSON" in run("peers").err
