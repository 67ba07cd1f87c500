"""What is at most sent, kept and asked for. Both sides hold each other to it; docs/wire.md."""

from dataclasses import dataclass
from typing import Final

from ctxfs.units import KIB, MIB

# Of the protocol: the same for all who speak this version.
BODY_BYTES_MAX: Final = MIB  # of one frame
HELLO_BYTES_MAX: Final = 4 * KIB  # of a frame before the hello is through
BATCH_MAX: Final = 1024  # keys of a lookup, entries of a forget or of a page of tombstones
SLOTS: Final = 1024  # of members
NAME_BYTES_MAX: Final = 255  # a member, a zone, a cluster, an attribute
VALUE_BYTES_MAX: Final = 64 * KIB  # of one attribute
ATTRIBUTES_MAX: Final = 1024
TEXT_BYTES_MAX: Final = 1000
STRIPE_BYTES_MIN: Final = 64 * KIB
STRIPE_BYTES_MAX: Final = 16 * MIB
LANES_MAX: Final = 64
REQUESTS_MIN: Final = 4  # some are kept for heartbeats
REQUESTS_MAX: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one side chooses. Of two sides, the lower figure holds."""

    requests_max: int = 256  # unanswered on one control connection
    stripe_bytes: int = 512 * KIB  # of a block, on one data connection, at a time
    window_bytes: int = 16 * MIB  # of one request, that may be under way without a new credit

    def __post_init__(self) -> None:
        """Raise ValueError where the figures do not go together."""
        if not REQUESTS_MIN <= self.requests_max <= REQUESTS_MAX:
            raise ValueError(f"requests_max is {REQUESTS_MIN} to {REQUESTS_MAX}")
        if not STRIPE_BYTES_MIN <= self.stripe_bytes <= STRIPE_BYTES_MAX:
            raise ValueError(f"stripe_bytes is {STRIPE_BYTES_MIN} to {STRIPE_BYTES_MAX}")
        if self.window_bytes < 2 * self.stripe_bytes:
            raise ValueError("window_bytes is at least two stripes, or credit comes too late")
