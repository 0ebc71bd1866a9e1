"""The messages between the hub and the ranks, as bytes.

A frame is a length (8 bytes, big-endian, of what follows the kind), a kind (1 byte) and a body. Bodies are text, JSON
or opaque payloads; nothing is ever pickled, so a stray peer can send nonsense but not run code.

From a rank: HELLO, then ENTER and RESULT per step, or ERROR; BEAT now and then; GOODBYE. From the hub: WELCOME once all
are there, one ANSWER per step, or one VERDICT; BEAT now and then; GOODBYE.
"""

from __future__ import annotations

import enum
import json
import struct
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

HEADER = struct.Struct(">QB")
COUNT = struct.Struct(">I")
LENGTH = struct.Struct(">Q")
STEP_LENGTH = struct.Struct(">H")

# A guess, far above the largest known payload: the index of a checkpoint of 100,000 tensors is about 10 MB.
MAX_PAYLOAD_BYTES = 1 << 28
# Enough for a HELLO, the only frame accepted from a peer that has not shown the token.
MAX_HELLO_BYTES = 4096


class Kind(enum.IntEnum):
    """What a frame says."""

    HELLO = 1
    WELCOME = 2
    ENTER = 3
    RESULT = 4
    ANSWER = 5
    ERROR = 6
    VERDICT = 7
    BEAT = 8
    GOODBYE = 9


class Frame(NamedTuple):
    """One message."""

    kind: Kind
    body: bytes


class Hello(NamedTuple):
    """How a rank introduces itself."""

    token: str
    rank: int
    host: str
    kernel: str


class Verdict(NamedTuple):
    """What ended the group: the arguments of the `RankFailedError` that every rank raises."""

    step: str
    rank: int
    host: str
    cause: str


class FrameReader:
    """Cuts a stream of bytes into frames."""

    def __init__(self, max_body_bytes: int) -> None:
        self.max_body_bytes = max_body_bytes
        self._pending = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """Return the frames that `data` completes.

        Raises:
            ValueError: If the bytes are not frames, or one is larger than `max_body_bytes`.
        """
        self._pending += data
        frames = []
        while len(self._pending) >= HEADER.size:
            length, kind = HEADER.unpack_from(self._pending)
            if length > self.max_body_bytes:
                raise ValueError(f"a frame of {length} bytes where at most {self.max_body_bytes} are expected")
            stop = HEADER.size + length
            if len(self._pending) < stop:
                break
            frames.append(Frame(Kind(kind), bytes(memoryview(self._pending)[HEADER.size : stop])))
            del self._pending[:stop]
        return frames


def encode(kind: Kind, body: bytes = b"") -> bytes:
    """Return the bytes of a frame."""
    return HEADER.pack(len(body), kind) + body


def encode_json(kind: Kind, content: object) -> bytes:
    """Return a frame whose body is JSON; escapes keep text that is not valid Unicode alive."""
    return encode(kind, json.dumps(content).encode("ascii"))


def decode_hello(frame: Frame) -> Hello:
    """Return what a HELLO says. It may come from a stranger, so nothing about it is taken for granted.

    Raises:
        ValueError: If it is no HELLO, or says something else.
    """
    if frame.kind is not Kind.HELLO:
        raise ValueError(f"it starts with {frame.kind.name}")
    try:
        match json.loads(frame.body):
            case [str(token), int(rank), str(host), str(kernel)]:
                return Hello(token, rank, host, kernel)
    except RecursionError:
        pass  # brackets all the way down are not a HELLO either
    raise ValueError("its HELLO does not hold a token, a rank and a host")


def encode_result(step: str, payload: bytes) -> bytes:
    """Return a RESULT frame."""
    name = step.encode()
    return b"".join(
        (
            HEADER.pack(STEP_LENGTH.size + len(name) + len(payload), Kind.RESULT),
            STEP_LENGTH.pack(len(name)),
            name,
            payload,
        )
    )


def decode_result(body: bytes) -> tuple[str, bytes]:
    """Return the step and the payload of a RESULT."""
    (length,) = STEP_LENGTH.unpack_from(body)
    stop = STEP_LENGTH.size + length
    return body[STEP_LENGTH.size : stop].decode(), body[stop:]


def encode_answer(payloads: Sequence[bytes]) -> bytes:
    """Return an ANSWER frame: the number of payloads, their lengths, and the payloads."""
    lengths = b"".join(LENGTH.pack(len(payload)) for payload in payloads)
    num_bytes = COUNT.size + len(lengths) + sum(map(len, payloads))
    return b"".join((HEADER.pack(num_bytes, Kind.ANSWER), COUNT.pack(len(payloads)), lengths, *payloads))


def decode_answer(body: bytes) -> tuple[bytes, ...]:
    """Return the payloads of an ANSWER."""
    (count,) = COUNT.unpack_from(body)
    start = COUNT.size + count * LENGTH.size
    payloads = []
    for place in range(count):
        (length,) = LENGTH.unpack_from(body, COUNT.size + place * LENGTH.size)
        payloads.append(body[start : start + length])
        start += length
    return tuple(payloads)


def max_answer_bytes(world_size: int) -> int:
    """Return the length of the largest ANSWER body, or of any other frame from the hub."""
    return COUNT.size + world_size * (LENGTH.size + MAX_PAYLOAD_BYTES)


def encode_verdict(verdict: Verdict) -> bytes:
    """Return a VERDICT frame."""
    return encode_json(Kind.VERDICT, verdict)


def decode_verdict(body: bytes) -> Verdict:
    """Return the verdict of a VERDICT."""
    return Verdict(*json.loads(body))
