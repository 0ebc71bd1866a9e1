"""The group of ranks behind torch.distributed's default process group.

Only its store, rank and world size are used. No collective runs, so neither the backend nor the time-outs that the
process group was made with matter here.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # re-exported without __all__

from shardferry.transport.address import address_towards
from shardferry.transport.connect import LOOPBACK, connect
from shardferry.transport.host import this_host
from shardferry.transport.solo import SoloGroup

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardferry.transport.base import Group

# Looking for a key costs 0.1 ms; a guess: the first looks come quickly, later ones spare a store with a thousand ranks.
FIRST_LOOK_S = 0.001
LAST_LOOK_S = 0.25
LOOK_AGAIN_AFTER = 1.25

# Per default store, this module's own connection to it.
_clones: WeakKeyDictionary[Store, Store] = WeakKeyDictionary()


def open_group(timeout_s: float) -> Group:
    """Return the group of the default process group's ranks, or of this process alone. Collective.

    Each call is a group of its own: a store key counts this rank's calls, so calls pair up in the order in which the
    ranks make them, also after a failure. Close the group, best with `with`.

    Args:
        timeout_s: How long a rank may be stopped, unreachable or missing before it counts as lost. A rank that
            works may take any time.

    Raises:
        RankFailedError: If a rank failed or did not call within `timeout_s`.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return SoloGroup(timeout_s)
    rank = dist.get_rank()
    store = _own_connection(_default_store())
    return connect(
        StoreRendezvous(_store_of_call(store, count=1)),
        rank,
        dist.get_world_size(),
        host=this_host(),
        bind_address=lambda: _address_towards(store),
        timeout_s=timeout_s,
    )


def store_of_call() -> Store:
    """Return a part of the default store that only the ranks of the group opened last share."""
    return PrefixStore("bulk", _store_of_call(_own_connection(_default_store()), count=0))


def forget_connection() -> None:
    """Use a new connection to the default store from now on: somebody may wait in this one for long."""
    _clones.pop(_default_store(), None)


@contextmanager
def launched_group(timeout_s: float) -> Iterator[Group]:
    """Give the group of the processes that torch's launcher has started, for a program that has none yet."""
    dist.init_process_group("gloo")
    try:
        with open_group(timeout_s) as group:
            yield group
    finally:
        dist.destroy_process_group()


def _default_store() -> Store:
    return dist.distributed_c10d._get_default_store()  # noqa: SLF001 - there is no public way to it


def _store_of_call(store: Store, *, count: int) -> Store:
    """Return the part of the store for this rank's last call, after counting `count` more."""
    calls = PrefixStore("shardferry", store)
    call = calls.add(f"calls-of-rank-{dist.get_rank()}", count)
    return PrefixStore(f"call-{call}", calls)


def _own_connection(default_store: Store) -> Store:
    """Return a clone of the default store: a thread of the user's that waits in the original cannot block it.

    It is made once per process group. A TCP store's server looks up the name of everybody who connects, for seconds
    where name servers do not answer, and all ranks wait meanwhile.
    """
    if default_store not in _clones:
        _clones[default_store] = default_store.clone()  # type: ignore[attr-defined]  # missing in torch's stubs
    return _clones[default_store]


class StoreRendezvous:
    """A rendezvous in a torch store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def set(self, key: str, value: bytes) -> None:
        """Leave `value` under `key`."""
        self._store.set(key, value)  # type: ignore[arg-type]  # torch's stubs know only str

    def get(self, key: str, timeout_s: float) -> bytes:
        """Return the value under `key`, waiting up to `timeout_s` for it.

        It looks now and then: `Store.wait` would keep signals out until it returns, and write a warning when it gives
        up.

        Raises:
            TimeoutError: If nobody left a value in time.
            ConnectionError: If the store is gone.
        """
        deadline = time.monotonic() + timeout_s
        pause_s = FIRST_LOOK_S
        try:
            while not self._store.check([key]):
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0:
                    raise TimeoutError(f"no value for {key!r} after {timeout_s:g} s")
                time.sleep(min(pause_s, remaining_s))
                pause_s = min(LOOK_AGAIN_AFTER * pause_s, LAST_LOOK_S)
            value: bytes = self._store.get(key)
        except RuntimeError as error:  # torch's own errors for a store derive from it
            raise ConnectionError(str(error)) from error
        return value

    def delete(self, key: str) -> None:
        """Remove the value under `key`."""
        self._store.delete_key(key)


def _address_towards(store: Store) -> str:
    """Return the address of this host that the other ranks reach, as far as the store tells.

    They all reach the machine of a TCP store, so this host's address on the way there is good for them too. A file or a
    dictionary is taken to be local.
    """
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return LOOPBACK
    return address_towards(store.host, store.port)
