"""The control plane's codec: every message survives, nothing hostile does, and nothing makes memory grow."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.errors import PeerError
from testbed.protocol import codec
from testbed.protocol.messages import AnyMessage, Hello, Message, PrefillStarted

MESSAGE_TYPES = get_args(AnyMessage)


def _strategy_of(kind: object) -> st.SearchStrategy[object]:
    """Values of a field's type; built from the declaration, so that a new message needs no new test."""
    info = kind if isinstance(kind, msgspec.inspect.Type) else msgspec.inspect.type_info(kind)
    match info:
        case msgspec.inspect.IntType():
            return st.integers(-(2**63), 2**64 - 1)
        case msgspec.inspect.StrType():
            return st.text(max_size=12)
        case msgspec.inspect.BytesType():
            return st.binary(max_size=24)
        case msgspec.inspect.BoolType():
            return st.booleans()
        case msgspec.inspect.VarTupleType(item_type=item):
            return st.lists(_strategy_of(item), max_size=3).map(tuple)
        case msgspec.inspect.DictType(key_type=key, value_type=value):
            return st.dictionaries(_strategy_of(key), _strategy_of(value), max_size=3)
        case msgspec.inspect.StructType(cls=cls, fields=fields):
            return st.builds(cls, **{field.name: _strategy_of(field.type) for field in fields})
    raise AssertionError(f"no strategy for {info}")


def test_every_message_class_is_in_the_union() -> None:
    def leaves(kind: type) -> set[type]:
        return {kind} if not kind.__subclasses__() else set().union(*map(leaves, kind.__subclasses__()))

    assert set(MESSAGE_TYPES) == leaves(Message)


@pytest.mark.parametrize("kind", MESSAGE_TYPES, ids=lambda kind: kind.__name__)
def test_round_trip(kind: type) -> None:
    @settings(max_examples=12)
    @given(_strategy_of(kind))
    def check(message: Message) -> None:
        assert codec.FrameReader().feed(codec.encode(message)) == [message]

    check()


@given(st.lists(st.text(max_size=20), max_size=8), st.integers(1, 40))
def test_any_fragmentation_gives_the_same_messages(names: list[str], step: int) -> None:
    stream = b"".join(codec.encode(PrefillStarted(name)) for name in names)
    reader, messages = codec.FrameReader(), []
    for at in range(0, len(stream), step):
        messages += reader.feed(stream[at : at + step])
    assert messages == [PrefillStarted(name) for name in names]
    assert reader.buffered_bytes == 0


@given(st.binary(max_size=200))
def test_random_bytes_are_refused_or_awaited_never_more(data: bytes) -> None:
    reader = codec.FrameReader()
    try:
        reader.feed(data)
    except PeerError:
        return
    assert reader.buffered_bytes <= len(data)


@given(_strategy_of(MESSAGE_TYPES[1]), st.integers(0, 10**6), st.integers(1, 255))
def test_a_flipped_byte_never_escapes_as_another_exception(message: Message, where: int, flip: int) -> None:
    frame = bytearray(codec.encode(message))
    frame[4 + where % (len(frame) - 4)] ^= flip
    try:
        codec.FrameReader().feed(bytes(frame))
    except PeerError as error:
        assert "malformed" in str(error)


@given(_strategy_of(MESSAGE_TYPES[1]), st.data())
def test_a_truncated_frame_is_awaited_not_delivered(message: Message, data: st.DataObject) -> None:
    frame = codec.encode(message)
    cut = data.draw(st.integers(0, len(frame) - 1))
    assert codec.FrameReader().feed(frame[:cut]) == []


def test_an_oversized_frame_is_refused_at_its_length() -> None:
    reader = codec.FrameReader()
    with pytest.raises(PeerError, match="at most"):
        reader.feed((codec.MAX_FRAME_BYTES + 1).to_bytes(4, "big"))


def test_own_oversized_message_is_refused_before_it_is_sent() -> None:
    with pytest.raises(PeerError, match="SubmitRequest"):
        codec.encode(MESSAGE_TYPES[1]("r", bytes(codec.MAX_FRAME_BYTES), 1))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",  # a byte that msgpack never uses
        b"\x90" * 50_000,  # nested arrays
        b"\x91" * 50_000,
        b"\x81" * 50_000,
        b"\xdd\xff\xff\xff\xff",  # an array of 2**32 - 1 elements, announced
        b"\xc6\xff\xff\xff\xff",  # a binary of 4 GiB, announced
        msgspec.msgpack.encode({"t": "Nothing"}),
        msgspec.msgpack.encode({"t": "PrefillStarted"}),
        msgspec.msgpack.encode({"t": "PrefillStarted", "request_id": 1}),
        msgspec.msgpack.encode({"t": "PrefillStarted", "request_id": "r"})[:-1],
        msgspec.msgpack.encode({"t": "PrefillStarted", "request_id": "r"}) + b"\0",
        b"\x83\xa1t\xaePrefillStarted\xaarequest_id\xa1r\xa2zz" + b"\x91" * 50_000,  # nested in a field to skip
        b"\x82\xa1t\xaePrefillStarted\xaarequest_id\xa2\xff\xfe",  # not UTF-8
    ],
)
def test_hostile_bodies(body: bytes) -> None:
    with pytest.raises(PeerError, match="malformed"):
        codec.decode(body)


def test_hello() -> None:
    assert codec.check_hello(codec.hello("pe0", 7), layout=7) == "pe0"
    with pytest.raises(PeerError, match="must agree"):
        codec.check_hello(codec.hello("pe0", 7), layout=8)
    with pytest.raises(PeerError, match="version 2"):
        codec.check_hello(Hello("pe0", 2, 7), layout=7)
    with pytest.raises(PeerError, match="must be a hello"):
        codec.check_hello(PrefillStarted("r"), layout=7)
