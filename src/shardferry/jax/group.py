"""The group of ranks behind jax.distributed: one rank per process.

Only the coordination service's key-value store is used, to find each other. A process that ends while the others wait
in a collective would abort them without a Python exception; so errors travel through the group first.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from jax._src import distributed  # the only way to the key-value store; multihost_utils goes there too

from shardferry.transport.address import address_towards
from shardferry.transport.connect import connect
from shardferry.transport.host import this_host
from shardferry.transport.solo import SoloGroup

if TYPE_CHECKING:
    from shardferry.transport.base import Group

# A guess: one request to the service waits so long, so that signals are handled in between.
LOOK_S = 0.2


class _Calls:
    """How many groups this process has opened in the job it is in."""

    def __init__(self) -> None:
        self._client: object = None
        self._count = 0

    def next(self, client: object) -> None:
        """Go to the next call; a new client is a new job."""
        if client is not self._client:
            self._client, self._count = client, 0
        self._count += 1

    @property
    def prefix(self) -> str:
        """What keys of the last call begin with."""
        return f"shardferry/call-{self._count}/"


_calls = _Calls()


def open_group(timeout_s: float) -> Group:
    """Return the group of the job's processes, or of this process alone. Collective.

    Calls pair up in the order in which the processes make them, also after a failure. Close the group, best with
    `with`.

    Args:
        timeout_s: How long a process may be stopped, unreachable or missing before it counts as lost. One that works
            may take any time.

    Raises:
        RankFailedError: If a process failed or did not call within `timeout_s`.
    """
    if jax.process_count() == 1:
        return SoloGroup(timeout_s)
    state = distributed.global_state
    last = _calls.prefix
    _calls.next(state.client)
    group = connect(
        KeyValueRendezvous(state.client, f"{_calls.prefix}group/"),
        jax.process_index(),
        jax.process_count(),
        host=this_host(),
        bind_address=lambda: address_towards(*_split(str(state.coordinator_address))),
        timeout_s=timeout_s,
    )
    if group.rank == 0:
        KeyValueRendezvous(state.client, last).delete("")  # all below it: whoever is here has left the last call
    return group


def rendezvous_of_call(name: str) -> KeyValueRendezvous:
    """Return a rendezvous of its own for the processes of the group that was opened last."""
    return KeyValueRendezvous(distributed.global_state.client, f"{_calls.prefix}{name}/")


class KeyValueRendezvous:
    """A rendezvous in the coordination service's key-value store."""

    def __init__(self, client: Any, prefix: str) -> None:  # noqa: ANN401 - jaxlib's client class has no public name
        self._client = client
        self._prefix = prefix

    def set(self, key: str, value: bytes) -> None:
        """Leave `value` under `key`."""
        self._client.key_value_set_bytes(self._prefix + key, value)

    def get(self, key: str, timeout_s: float) -> bytes:
        """Return the value under `key`, waiting up to `timeout_s` for it.

        Raises:
            TimeoutError: If nobody left a value in time.
            ConnectionError: If the service is gone.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            remaining_s = max(0.001, min(LOOK_S, deadline - time.monotonic()))
            try:
                value: bytes = self._client.blocking_key_value_get_bytes(self._prefix + key, int(1000 * remaining_s))
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise ConnectionError(str(error)) from error
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"no value for {key!r} after {timeout_s:g} s") from error
            else:
                return value

    def delete(self, key: str) -> None:
        """Remove the value under `key`."""
        self._client.key_value_delete(self._prefix + key)


class _Address(NamedTuple):
    host: str
    port: int


def _split(address: str) -> _Address:
    """Return host and port of `host:port`; the host of an IPv6 address is in brackets."""
    host, _, port = address.rpartition(":")
    return _Address(host.strip("[]"), int(port))
