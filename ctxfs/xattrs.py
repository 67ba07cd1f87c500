"""Names of the extended attributes: the contract between the daemon and everybody's tools.

Value formats are in ctxfs(7). Sizes are bytes, durations seconds, unless written otherwise.
"""

from typing import Final

PREFIX: Final = b"user.ctx."
USER_PREFIX: Final = b"user."

TIER: Final = b"user.ctx.tier"
COPIES: Final = b"user.ctx.copies"
TTL: Final = b"user.ctx.ttl"
PIN: Final = b"user.ctx.pin"
PARENT: Final = b"user.ctx.parent"
DTYPE: Final = b"user.ctx.dtype"
TOGETHER: Final = b"user.ctx.together"
PREFETCH: Final = b"user.ctx.prefetch"
VERIFY: Final = b"user.ctx.verify"
DIGEST: Final = b"user.ctx.digest"
STATE: Final = b"user.ctx.state"
GENERATION: Final = b"user.ctx.generation"
STORED: Final = b"user.ctx.stored"
CODEC: Final = b"user.ctx.codec"
HITS: Final = b"user.ctx.hits"
IDLE: Final = b"user.ctx.idle"
CREATED: Final = b"user.ctx.created"
REPLICAS: Final = b"user.ctx.replicas"  # reads as reached/wanted, written as wanted
STORY: Final = b"user.ctx.story"  # JSON of all the others; readable, not listed

# Of the directory `.ctx`, written by root or the daemon's own user: PATH, or PATH:SIZE.
DEVICE_ADD: Final = b"user.ctx.device.add"
DEVICE_DRAIN: Final = b"user.ctx.device.drain"
DEVICE_GROW: Final = b"user.ctx.device.grow"

# Always there on a block, so that `getfattr -d` tells its story. What can be written is listed
# where it is set: a program that copies attributes must not set what nobody asked for.
BLOCK_LISTED: Final = (COPIES, STATE, GENERATION, STORED, CODEC, HITS, IDLE, CREATED)
BLOCK_WRITABLE: Final = frozenset({TIER, TTL, PIN, PARENT, DTYPE, REPLICAS, PREFETCH, VERIFY})
BLOCK_READ_ONLY: Final = frozenset(
    {COPIES, DIGEST, STATE, GENERATION, STORED, CODEC, HITS, IDLE, CREATED, STORY}
)
DIRECTORY_WRITABLE: Final = frozenset({TTL, TOGETHER, REPLICAS})

NAME_BYTES_MAX: Final = 255
VALUE_BYTES_MAX: Final = 65_536  # the kernel's XATTR_SIZE_MAX
