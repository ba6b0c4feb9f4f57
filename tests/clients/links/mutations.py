"""Seeded mutations of what a daemon answers: fields with wrong numbers, broken payloads, broken frames."""

import os
from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from kvtier.v1 import kvcache_pb2 as pb
from kvtier.v1.local import HEADER, Flag, Frame, Method, encode

_WHOLE = {
    FieldDescriptor.TYPE_UINT32: 32,
    FieldDescriptor.TYPE_UINT64: 64,
    FieldDescriptor.TYPE_ENUM: 31,
}


def mutated(message: Any, random: Random) -> bytes:
    """Return the payload of a message that is wrong in one place."""
    payload: bytes = message.SerializeToString()
    match random.randrange(8):
        case 0:
            return payload[: random.randrange(len(payload) + 1)]
        case 1:
            return random.randbytes(random.randrange(64))
        case 2 if payload:
            at = random.randrange(len(payload))
            return payload[:at] + bytes([payload[at] ^ 1 << random.randrange(8)]) + payload[at + 1 :]
        case _:
            copy = type(message).FromString(payload)
            _change(copy, random)
            changed: bytes = copy.SerializeToString()
            return changed


def mutated_frames(frame: Frame, random: Random) -> bytes:
    """Return the bytes of an answer's frame that are not one good answer to its call."""
    match random.randrange(8):
        case 0:
            return encode(frame) * 2
        case 1:
            return encode(frame._replace(call=random.choice((0, frame.call + 1, 1 << 63))))
        case 2:
            return encode(frame._replace(method=random.choice(list(Method))))
        case 3:
            return encode(frame._replace(flags=random.randrange(16)))
        case 4:
            return HEADER.pack(random.choice((1 << 22, 1 << 32 - 1)), frame.method, 0, frame.call)
        case 5:
            return HEADER.pack(len(frame.payload), random.randrange(1 << 16), 0, frame.call) + frame.payload
        case 6:
            stray = Frame(Method.ACQUIRE, Flag.NONE, 999, pb.AcquireResponse().SerializeToString())
            return encode(stray) * 100 + encode(frame)
        case _:
            return encode(frame._replace(flags=Flag.ERROR | Flag.LAST))


def mutated_descriptors(wanted: int, random: Random) -> list[int]:
    """Return new file descriptors, too many, too few, or of no memory; the caller closes them."""
    makers = (
        lambda: os.open("/dev/null", os.O_RDWR),
        lambda: os.memfd_create("empty"),
        lambda: _memfd(4096, random),
        lambda: _memfd(random.choice((1 << 20, 2 << 20)), random),
        lambda: os.eventfd(0),
    )
    return [random.choice(makers)() for _ in range(random.choice((0, 1, wanted, wanted, wanted + 1)))]


def _memfd(num_bytes: int, random: Random) -> int:
    descriptor = os.memfd_create("noise")
    os.truncate(descriptor, num_bytes)
    os.pwrite(descriptor, random.randbytes(4096), random.randrange(0, num_bytes, 4096))
    return descriptor


def _change(message: Message, random: Random) -> None:
    """Give one field of a message another value."""
    if not message.DESCRIPTOR.fields:
        return
    fields: Any = message.DESCRIPTOR.fields
    field: FieldDescriptor = random.choice(fields)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return
    if field.is_repeated:
        values = getattr(message, field.name)
        if len(values) and random.randrange(2):
            del values[random.randrange(len(values)) :]
        elif field.message_type is None:
            values.append(_value(field, random))
            if random.randrange(2):
                values[0] = _value(field, random)
        else:
            _change(values.add(), random)
    elif field.message_type is not None:
        _change(getattr(message, field.name), random)
    else:
        setattr(message, field.name, _value(field, random))


def _value(field: FieldDescriptor, random: Random) -> Any:
    if field.type in _WHOLE:
        bits = _WHOLE[field.type]
        numbers = (0, 1, 2, 3, 7, 255, 4096, 16384, 1 << bits - 1, (1 << bits) - 1, (1 << bits) - 4096)
        return random.choice(numbers) % (1 << bits)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return random.randbytes(random.choice((0, 1, 2, 3, 16, 33)))
    if field.type == FieldDescriptor.TYPE_STRING:
        return random.choice(("", "identity", "auto", "é\n" * 9))
    if field.type == FieldDescriptor.TYPE_BOOL:
        return bool(random.randrange(2))
    return random.choice((0.0, -1.0, float("nan"), float("inf")))
