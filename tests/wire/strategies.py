"""Messages as hypothesis makes them up."""

from hypothesis import strategies as st

from ctxfs.wire import messages as m

u8 = st.integers(0, 2**8 - 1)
u16 = st.integers(0, 2**16 - 1)
u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
_part = st.binary(min_size=1, max_size=255).filter(
    lambda part: not set(part) & {0, 0x2F} and part not in (b".", b"..")
)
keys = st.lists(_part, min_size=1, max_size=3).map(b"/".join)
names = st.binary(max_size=255)
tokens = st.binary(min_size=16, max_size=16)
texts = st.text(max_size=200)

attributes = st.builds(
    m.Attributes,
    mode=u32,
    uid=u32,
    gid=u32,
    created_ns=u64,
    mtime_ns=u64,
    ttl_ns=u64,
    pin_ns=u64,
    parent=st.just(b"") | keys,
    dtype=names,
    user=st.lists(st.tuples(names, st.binary(max_size=300)), max_size=4).map(tuple),
)
gone_keys = st.builds(m.GoneKey, keys, u64, u64)
_many_gone = st.lists(gone_keys, max_size=4).map(tuple)
haves = st.builds(
    m.Have, version=u64, size=u64, digest=tokens, tiers=u8, load=u8, attributes=attributes
)
answers = st.builds(m.Miss) | st.builds(m.Gone, u64, u64) | haves

hellos = st.builds(
    m.Hello,
    oldest=u16,
    newest=u16,
    minor=u16,
    role=st.sampled_from(m.Role),
    cluster=names,
    name=names,
    slot=u16,
    zone=names,
    capabilities=u64,
    session=tokens,
    requests_max=u32,
    stripe_bytes=u32,
)
welcomes = st.builds(
    m.Welcome,
    version=u16,
    minor=u16,
    cluster=names,
    name=names,
    slot=u16,
    zone=names,
    capabilities=u64,
    requests_max=u32,
    stripe_bytes=u32,
)
_vectors = st.lists(st.tuples(u16, u64), max_size=4).map(tuple)
rejections = st.builds(m.Rejected, st.sampled_from(m.Reason), texts)
requests: st.SearchStrategy[m.Request] = st.one_of(
    st.builds(m.Lookup, st.lists(keys, min_size=1, max_size=4).map(tuple), u32),
    st.builds(m.Read, keys, u64, u64, u64, u64, u32),
    st.builds(m.Offer, keys, u64, u64, tokens, attributes, u32),
    st.builds(m.Lease, keys, u64, u32, u32),
    st.builds(m.Release, u64),
    st.builds(m.Forget, _many_gone),
    st.builds(m.Sync, _vectors, u64),
    st.builds(m.Heartbeat),
)
replies: st.SearchStrategy[m.Reply] = st.one_of(
    st.builds(m.Found, st.lists(answers, max_size=4).map(tuple)),
    st.builds(m.Wanted, u64),
    st.builds(m.Stored, st.sampled_from(m.Durability)),
    st.builds(m.Leased, u64, u64),
    st.builds(m.Acknowledged),
    st.builds(m.Tombstones, _many_gone, u64, _vectors, _vectors),
    st.builds(m.Stats, clock_ns=u64, load=u8, capacity_bytes=u64, free_bytes=u64, blocks=u64),
    st.builds(
        m.Refused,
        reason=st.sampled_from(m.Reason),
        version=u64,
        until_ns=u64,
        retry_ms=u32,
        text=texts,
    ),
    st.builds(m.Ended),
)
stripes = st.builds(m.Stripe, u64, st.integers(1, 2**32 - 1))
messages: st.SearchStrategy[m.Message] = st.one_of(
    hellos,
    welcomes,
    rejections,
    requests,
    st.builds(m.Credit, u64),
    st.builds(m.Cancel),
    replies,
    stripes,
)
