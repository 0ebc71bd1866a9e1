"""Whatever a rank raises, it can be told."""

from __future__ import annotations

from typing import NoReturn

import pytest

from shardferry.transport.solo import SoloGroup
from shardferry.transport.together import MAX_CAUSE_CHARACTERS, describe_error, together


class UnprintableError(Exception):
    """Cannot be turned into text."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (ValueError("3 is odd"), "ValueError: 3 is odd"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (SystemExit(3), "SystemExit: 3"),
        (MemoryError(), "MemoryError"),
        (UnprintableError(), "UnprintableError: (no message: its __str__ raised RuntimeError)"),
        (OSError(28, "No space left on device", "/x"), "OSError: [Errno 28] No space left on device: '/x'"),
    ],
)
def test_an_error_is_described_by_type_and_message(error: BaseException, cause: str) -> None:
    assert describe_error(error) == cause


def test_a_huge_message_is_cut() -> None:
    assert len(describe_error(ValueError("x" * 10**6))) == MAX_CAUSE_CHARACTERS + len("ValueError: ")


def test_a_single_rank_gets_its_own_payload() -> None:
    with SoloGroup() as group:
        assert together(group, "read tensors", lambda: b"mine") == (b"mine",)


def test_a_single_rank_raises_its_own_error() -> None:
    def fail() -> NoReturn:
        raise KeyboardInterrupt

    with SoloGroup() as group, pytest.raises(KeyboardInterrupt):
        together(group, "read tensors", fail)
