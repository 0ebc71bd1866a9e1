"""The group of ranks that meet at a hub, from one rank's point of view."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from shardferry.errors import InvalidInputError, RankFailedError
from shardferry.transport.frames import MAX_PAYLOAD_BYTES, Hello, Kind, Verdict, encode, encode_json, encode_result
from shardferry.transport.together import describe_error

if TYPE_CHECKING:
    from types import TracebackType

    from shardferry.transport.host import Host
    from shardferry.transport.hub import Hub
    from shardferry.transport.link import Link

# A guess: the hub answers an error within milliseconds unless it is gone, which the link notices.
TOLD_WITHIN_S = 5.0


class HubGroup:
    """A group over a link to the hub; on rank 0 it also owns the hub."""

    def __init__(
        self, link: Link, hub: Hub | None, *, rank: int, world_size: int, hub_host: str, timeout_s: float
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.hosts: tuple[str, ...] = ()
        self._link = link
        self._hub = hub
        self._hub_host = hub_host
        self._step = "connecting"
        self._has_told = False

    def join(self, token: str, host: Host) -> None:
        """Introduce this rank and wait until all ranks are there. Collective; called once, before anything else.

        Raises:
            RankFailedError: If a rank did not come, or failed.
        """
        self._link.send(encode_json(Kind.HELLO, Hello(token, self.rank, *host)))
        self._link.wait(lambda: bool(self._link.hosts), limit_s=None)
        self.hosts = self._link.hosts
        if not self.hosts:
            raise self._error()
        self._step = "work before the first step"

    def enter(self, step: str) -> None:
        """Tell the others that this rank starts `step`."""
        self.check()
        self._step = step
        if self._link.has_ended:
            raise self._error()
        self._link.send(encode(Kind.ENTER, step.encode()))

    def exchange(self, step: str, payload: bytes) -> tuple[bytes, ...]:
        """Return the payloads of all ranks, in rank order. Collective.

        Raises:
            RankFailedError: If a rank failed, ended, was lost, or is in another step.
            InvalidInputError: If the payload is too large for the control plane.
        """
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise InvalidInputError(f"{step}: {len(payload)} bytes to exchange; a rank may send {MAX_PAYLOAD_BYTES}")
        self.check()
        self._step = step
        self._link.answer = None
        self._link.send(encode_result(step, payload))
        self._link.wait(lambda: self._link.answer is not None, limit_s=None)
        # An answer is given to all ranks or to none, so it counts also when a verdict on what followed came with it.
        if self._link.answer is None:
            raise self._error()
        self._step = f"work after {step}"
        return self._link.answer

    def fail(self, step: str, cause: str) -> None:
        """Tell the others that this rank failed in `step`; return when the hub has sent them its verdict."""
        self._has_told = True
        if self._link.verdict is None:
            self._link.send(encode_json(Kind.ERROR, [step, cause]))
            self._link.wait(lambda: False, limit_s=TOLD_WITHIN_S)

    def check(self) -> None:
        """Raise if another rank is known to have failed. Never waits.

        Raises:
            RankFailedError: If a rank has failed.
        """
        if self._link.verdict is not None:
            raise self._error()

    def wait_until_left(self, limit_s: float) -> bool:
        """Return whether all other ranks have left the group, waiting at most `limit_s` for it; rank 0 only."""
        if self._hub is None:
            raise RuntimeError(f"rank {self.rank} waits for the others to leave: only rank 0 can know")
        return self._hub.wait_until_left(limit_s)

    def close(self) -> None:
        """Leave the group. On rank 0 the hub ends too, once it has told all ranks what there was to tell."""
        try:
            self._link.close()
        finally:
            if self._hub is not None:
                self._hub.close()

    def __enter__(self) -> Self:
        """Return the group."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Tell the others of an error that leaves the block, unless they know, and leave the group."""
        try:
            if error is not None and not self._has_told:
                self.fail(self._step, describe_error(error))
        finally:
            self.close()

    def _error(self) -> RankFailedError:
        left = Verdict(self._step, 0, self._hub_host, "it left the group before this step")
        verdict = self._link.verdict or left
        return RankFailedError(verdict.step or self._step, verdict.rank, self.world_size, verdict.host, verdict.cause)
