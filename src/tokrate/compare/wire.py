"""Protocol buffers read by hand: only the fields that are wanted, without the schema's package.

A message is a run of fields; each begins with a number that holds the field's number and how its
value is kept (https://protobuf.dev/programming-guides/encoding/).
"""

from __future__ import annotations

from collections.abc import Iterator

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


def varint(data: bytes | memoryview, place: int) -> tuple[int, int]:
    """A number of variable length, and the place behind it.

    Raises:
        IndexError: The data ends within it.
    """
    number = shift = 0
    while True:
        byte = data[place]
        place += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, place
        shift += 7
        if shift > 63:
            raise ValueError("a varint of more than 10 bytes")


def fields(data: bytes | memoryview, place: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """The fields of a message: number, kind, and where the value begins and ends.

    Raises:
        ValueError: This is no message.
        IndexError: It is torn.
    """
    while place < end:
        head, place = varint(data, place)
        number, kind = head >> 3, head & 7
        if kind == BYTES:
            length, place = varint(data, place)
            behind = place + length
        elif kind == VARINT:
            _, behind = varint(data, place)
        elif kind in (FIXED32, FIXED64):
            behind = place + (4 if kind == FIXED32 else 8)
        else:
            raise ValueError(f"field {number} is kept in a way ({kind}) that is not known")
        if behind > end:
            raise IndexError(f"field {number} is torn")
        yield number, kind, place, behind
        place = behind


def text(data: bytes | memoryview, place: int, end: int) -> str:
    """A field of bytes as text."""
    return bytes(data[place:end]).decode("utf-8", "replace")
