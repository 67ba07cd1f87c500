"""How long members wait for each other."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds. A dead peer is found by a missed deadline, or by heartbeats that stay away."""

    dial_s: float = 2.0  # to connect, with TLS and hello, one connection
    beat_s: float = 0.5  # between heartbeats
    beat_deadline_s: float = 0.5  # an answer takes no longer, or the peer is not asked meanwhile
    doubt_s: float = 0.08  # the same for one that has just missed the deadline of a request
    silence_s: float = 3.0  # without a byte, and the connections are made anew
    stall_s: float = 10.0  # a data connection that takes nothing for so long is over
    backoff_min_s: float = 0.1  # between attempts to connect; doubles, with jitter
    backoff_max_s: float = 5.0
    idle_s: float = 15.0  # a listener's patience with a peer that sends not even heartbeats

    def __post_init__(self) -> None:
        """Raise ValueError where the figures do not go together."""
        if self.silence_s < self.beat_s + self.beat_deadline_s:
            raise ValueError("silence_s is at least beat_s + beat_deadline_s")
        if self.idle_s < self.silence_s:
            raise ValueError("idle_s is at least silence_s: who dials makes anew first")
