"""Whole blocks to streams and back: the codec's door. The format is in docs/codec.md.

    found = plan(content, dtype, settings)
    encoded = found and encode(content, found, allocate, keys=keys, context=generation_and_digest)
    decode_into(encoded, target, keys=keys, context=generation_and_digest)

All of it is synchronous and to be called in a thread. `spread` shares out a block's chunks among
more: it is called as `map` is, and may be the `map` of an executor.
"""

from ctxfs.codec.decoding import decode_into
from ctxfs.codec.encoding import encode
from ctxfs.codec.header import Header, describe, read_header
from ctxfs.codec.plan import CodecSettings, Plan, encoded_length_max, plan, stored_plan
from ctxfs.codec.spreading import Spread

__all__ = [
    "CodecSettings",
    "Header",
    "Plan",
    "Spread",
    "decode_into",
    "describe",
    "encode",
    "encoded_length_max",
    "plan",
    "read_header",
    "stored_plan",
]
