"""Messages survive being cut anywhere, and nonsense is refused."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardferry.transport.frames import (
    HEADER,
    Frame,
    FrameReader,
    Kind,
    Verdict,
    decode_answer,
    decode_result,
    decode_verdict,
    encode,
    encode_answer,
    encode_json,
    encode_result,
    encode_verdict,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


@given(
    frames=st.lists(st.tuples(st.sampled_from(list(Kind)), st.binary(max_size=40)), max_size=8),
    piece_bytes=st.integers(1, 50),
)
def test_frames_arrive_whole_however_the_stream_is_cut(frames: Sequence[tuple[Kind, bytes]], piece_bytes: int) -> None:
    stream = b"".join(encode(kind, body) for kind, body in frames)
    reader = FrameReader(max_body_bytes=40)

    received = [
        frame
        for start in range(0, len(stream), piece_bytes)
        for frame in reader.feed(stream[start : start + piece_bytes])
    ]

    assert received == [Frame(kind, body) for kind, body in frames]


def test_a_frame_longer_than_allowed_is_refused_before_it_arrives() -> None:
    with pytest.raises(ValueError, match="a frame of 101 bytes where at most 100"):
        FrameReader(max_body_bytes=100).feed(HEADER.pack(101, Kind.BEAT))


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="200"):
        FrameReader(max_body_bytes=100).feed(HEADER.pack(0, 200))


@given(step=st.text(max_size=20), payload=st.binary(max_size=50))
def test_results_are_read_back(step: str, payload: bytes) -> None:
    assert decode_result(encode_result(step, payload)[HEADER.size :]) == (step, payload)


@given(payloads=st.lists(st.binary(max_size=50), max_size=10))
def test_answers_are_read_back(payloads: list[bytes]) -> None:
    assert decode_answer(encode_answer(payloads)[HEADER.size :]) == tuple(payloads)


def test_a_verdict_with_text_that_is_no_unicode_is_read_back() -> None:
    verdict = Verdict("read tensors", 3, "gpu-7", "OSError: '/ckpt/\udcff'")

    assert decode_verdict(encode_verdict(verdict)[HEADER.size :]) == verdict


def test_json_bodies_are_ascii() -> None:
    assert json.loads(encode_json(Kind.ERROR, ["é", "\udcff"])[HEADER.size :].decode("ascii")) == ["é", "\udcff"]
