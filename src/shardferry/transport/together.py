"""Steps that succeed on all ranks or fail on all ranks.

A step that one rank can fail alone runs in `together`. Results and errors travel as data, so the ranks that did not
fail know which one did and why, and none waits for a message that will never come.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardferry.transport.base import Group

# A guess: the longest cause worth showing on every rank of a large job.
MAX_CAUSE_CHARACTERS = 16_384


def together(group: Group, step: str, work: Callable[[], bytes]) -> tuple[bytes, ...]:
    """Run `work` and return what it returned on every rank, in rank order. Collective.

    Args:
        group: The ranks of this call.
        step: What `work` does, in words that finish "... failed on rank 3", the same on every rank.
        work: This rank's part; returns what the other ranks need to know. It may take any time. If it is long it
            calls `group.check()` now and then, to stop when another rank has failed.

    Raises:
        RankFailedError: If another rank failed in this step or before it.
        BaseException: Whatever `work` raised here, after the others have been told.
    """
    group.enter(step)
    try:
        payload = work()
    # Also KeyboardInterrupt and SystemExit: the other ranks must not wait for a rank that is about to end.
    except BaseException as error:
        group.fail(step, describe_error(error))
        raise
    return group.exchange(step, payload)


def describe_error(error: BaseException) -> str:
    """Return the type and message of `error`, whatever state it is in.

    Examples:
        >>> describe_error(ValueError("3 is odd")), describe_error(MemoryError())
        ('ValueError: 3 is odd', 'MemoryError')
    """
    name = type(error).__name__
    try:
        message = str(error)
    except BaseException as unprintable:  # noqa: BLE001 - an error that cannot be printed must still be told
        message = f"(no message: its __str__ raised {type(unprintable).__name__})"
    return f"{name}: {message[:MAX_CAUSE_CHARACTERS]}" if message else name
