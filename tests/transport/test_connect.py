"""How ranks find each other, and what they say when they do not."""

from __future__ import annotations

import os
import select
import signal
import threading
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from shardferry.errors import RankFailedError
from shardferry.transport.connect import LOOPBACK, connect
from shardferry.transport.host import Host
from shardferry.transport.memory import MemoryRendezvous

if TYPE_CHECKING:
    from collections.abc import Callable

HERE = Host("here", "kernel-1")


def test_a_rank_0_that_never_calls_is_named() -> None:
    with pytest.raises(RankFailedError, match=r"connecting failed on rank 0 of 2.*did not make this call within 0.1 s"):
        connect(MemoryRendezvous(), 1, 2, host=HERE, bind_address=lambda: LOOPBACK, timeout_s=0.1)


def test_ranks_that_never_call_are_named_on_rank_0() -> None:
    with pytest.raises(RankFailedError, match=r"on rank 1 of 3.*ranks 1-2 did not make this call within 0.2 s"):
        connect(MemoryRendezvous(), 0, 3, host=HERE, bind_address=lambda: LOOPBACK, timeout_s=0.2)


def test_a_rank_0_that_cannot_listen_tells_the_others_why() -> None:
    rendezvous = MemoryRendezvous()

    def fail() -> NoReturn:
        raise OSError("no network here")

    with pytest.raises(OSError, match="no network here"):
        connect(rendezvous, 0, 2, host=HERE, bind_address=fail, timeout_s=5.0)
    with pytest.raises(RankFailedError, match=r"on rank 0 of 2 \(host here\): OSError: no network here"):
        connect(rendezvous, 1, 2, host=HERE, bind_address=fail, timeout_s=5.0)


def test_a_hub_on_the_loopback_of_another_machine_is_not_tried() -> None:
    rendezvous = MemoryRendezvous()
    elsewhere = Host("elsewhere", "kernel-2")

    own, others = _connect_both(
        lambda: connect(rendezvous, 0, 2, host=HERE, bind_address=lambda: LOOPBACK, timeout_s=0.5),
        lambda: connect(rendezvous, 1, 2, host=elsewhere, bind_address=lambda: LOOPBACK, timeout_s=0.5),
    )

    assert isinstance(own, RankFailedError)
    assert own.rank == 1
    assert isinstance(others, RankFailedError)
    assert others.rank == 0
    assert "runs on another machine" in others.cause


def test_the_rendezvous_is_left_empty() -> None:
    rendezvous = MemoryRendezvous()

    def join(rank: int) -> None:
        connect(rendezvous, rank, 2, host=HERE, bind_address=lambda: LOOPBACK, timeout_s=5.0).close()

    _connect_both(lambda: join(0), lambda: join(1))

    with pytest.raises(TimeoutError):
        rendezvous.get("hub", timeout_s=0.0)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # Python 3.12 warns of threads; the child only looks
def test_a_forked_child_does_not_keep_connections_open() -> None:
    rendezvous = MemoryRendezvous()
    groups = _connect_both(
        *(
            partial(connect, rendezvous, rank, 2, host=HERE, bind_address=lambda: LOOPBACK, timeout_s=5.0)
            for rank in range(2)
        )
    )
    readable, writable = os.pipe()
    num_sockets = len(_sockets())
    child = os.fork()
    if child == 0:
        try:
            os.write(writable, b"%d" % len(_sockets()))
        finally:
            os._exit(0)  # whatever happens: a child that went on would be a second pytest
    try:
        assert select.select([readable], [], [], 10)[0]
        assert num_sockets - int(os.read(readable, 20)) >= 2 + 2 + 1  # two ends of two connections, and the listener
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(readable)
        os.close(writable)
        for group in reversed(groups):
            group.close()


def _sockets() -> list[str]:
    links = []
    for descriptor in os.listdir("/proc/self/fd"):  # noqa: PTH208 - a child of a fork does as little as it can
        try:
            links.append(os.readlink(f"/proc/self/fd/{descriptor}"))  # noqa: PTH115 - as above
        except OSError:
            continue
    return [link for link in links if link.startswith("socket:")]


def _connect_both(*calls: Callable[[], object]) -> list[Any]:
    outcomes: dict[int, Any] = {}

    def run(place: int, call: Callable[[], object]) -> None:
        try:
            outcomes[place] = call()
        except RankFailedError as error:
            outcomes[place] = error

    threads = [threading.Thread(target=run, args=item) for item in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return [outcomes[place] for place in range(len(calls))]
