"""When a peer is asked, and when not."""

from ctxfs.wire.breaker import PAUSE_MIN_NS, Breaker, Health

MS = 1_000_000


def test_one_missed_deadline_of_a_silent_peer_is_enough() -> None:
    breaker = Breaker()
    assert breaker.admits(0)
    breaker.missed(sent_ns=10 * MS, now_ns=60 * MS, heard_ns=5 * MS)
    assert not breaker.admits(61 * MS)
    assert (breaker.health, breaker.since_ns, breaker.opened) == (Health.BROKEN, 60 * MS, 1)
    breaker.heard(90 * MS)
    assert breaker.admits(90 * MS)


def test_a_peer_that_others_heard_of_meanwhile_is_not_dead() -> None:
    breaker = Breaker()
    breaker.missed(sent_ns=10 * MS, now_ns=60 * MS, heard_ns=20 * MS)
    assert breaker.admits(61 * MS)


def test_a_peer_that_lives_and_never_answers_in_time_is_asked_rarely() -> None:
    breaker = Breaker()
    for turn in range(3):
        at = turn * 100 * MS
        breaker.missed(at + 10, at + 90, heard_ns=at + 20)
    assert breaker.health is Health.SLOW
    now = 200 * MS + 90
    breaker.heard(now + 1)
    assert not breaker.admits(now + PAUSE_MIN_NS - 1)
    now += PAUSE_MIN_NS
    assert breaker.admits(now)
    assert not breaker.admits(now + 1), "one request tries, the others do not"
    breaker.missed(now + 1, now + 50 * MS, heard_ns=now + 2)
    assert not breaker.admits(now + 50 * MS + PAUSE_MIN_NS)
    assert breaker.admits(now + 50 * MS + 2 * PAUSE_MIN_NS)
    breaker.answered()
    assert breaker.admits(now + 50 * MS + 2 * PAUSE_MIN_NS + 1)


def test_a_peer_whose_heartbeats_heal_it_and_whose_store_hangs_is_slow_in_the_end() -> None:
    breaker = Breaker()
    for turn in range(3):
        breaker.missed(turn * 100 * MS + 10, turn * 100 * MS + 90, heard_ns=0)
        assert breaker.health is Health.BROKEN
        breaker.heard(turn * 100 * MS + 95)
    assert breaker.health is Health.SLOW


def test_a_broken_connection_breaks_it_and_an_answer_mends_it() -> None:
    breaker = Breaker()
    breaker.broke(5)
    breaker.broke(9)
    assert (breaker.since_ns, breaker.opened) == (5, 1)
    breaker.answered()
    assert breaker.admits(11)
