"""How ranks that share only a rendezvous become a group.

Rank 0 starts the hub and leaves its address and a fresh token at the rendezvous. Every rank, rank 0 too, connects,
shows the token, and waits until all are there. The token keeps strangers and ranks of another job out; it does not hide
anything from someone who can read the network.
"""

from __future__ import annotations

import json
import secrets
import socket
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from shardferry.errors import RankFailedError
from shardferry.transport.hub import Hub
from shardferry.transport.hub_group import HubGroup
from shardferry.transport.link import Link
from shardferry.transport.together import describe_error

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardferry.transport.base import Group, Rendezvous
    from shardferry.transport.host import Host

HUB_KEY = "hub"
LOOPBACK = "127.0.0.1"

# A guess: longer than a lost SYN takes to be sent again a few times; the hub listens before its address is known.
REACHED_WITHIN_S = 30.0


@dataclass(frozen=True, slots=True)
class _Invitation:
    """What rank 0 leaves at the rendezvous; `error` alone is set if it could not start the hub."""

    address: str
    port: int
    token: str
    host: str
    kernel: str
    error: str


def connect(
    rendezvous: Rendezvous,
    rank: int,
    world_size: int,
    *,
    host: Host,
    bind_address: Callable[[], str],
    timeout_s: float,
) -> Group:
    """Return the group of `world_size` ranks that share `rendezvous`. Collective.

    Args:
        rendezvous: Where the ranks find the hub; no other group may use it.
        rank: This process's rank.
        world_size: Number of ranks, at least 2.
        host: The machine of this rank.
        bind_address: Returns the address at which the other ranks reach rank 0; called on rank 0 only.
        timeout_s: How long a rank may be silent, or missing, before it counts as lost.

    Raises:
        RankFailedError: If a rank failed or did not call within `timeout_s`.
        OSError: On rank 0, if it cannot listen.
    """
    hub = None
    if rank == 0:
        hub, invitation = _invite(rendezvous, world_size, host, bind_address, timeout_s)
    else:
        invitation = _await_invitation(rendezvous, world_size, timeout_s)
    try:
        link = _reach(invitation, world_size, host, timeout_s)
    except BaseException:
        if hub is not None:
            hub.close()
        raise
    group = HubGroup(link, hub, rank=rank, world_size=world_size, hub_host=invitation.host, timeout_s=timeout_s)
    try:
        group.join(invitation.token, host)
        if rank == 0:
            rendezvous.delete(HUB_KEY)  # everyone has read it, and the store is the user's
    except BaseException as error:
        group.__exit__(type(error), error, error.__traceback__)
        raise
    return group


def _invite(
    rendezvous: Rendezvous, world_size: int, host: Host, bind_address: Callable[[], str], timeout_s: float
) -> tuple[Hub, _Invitation]:
    token = secrets.token_hex(16)
    try:
        address = bind_address()
        hub = Hub(address, world_size=world_size, token=token, timeout_s=timeout_s)
    except BaseException as error:
        failure = _Invitation("", 0, "", host.name, host.kernel, error=describe_error(error))
        rendezvous.set(HUB_KEY, json.dumps(asdict(failure)).encode())
        raise
    invitation = _Invitation(address, hub.port, token, host.name, host.kernel, error="")
    try:
        rendezvous.set(HUB_KEY, json.dumps(asdict(invitation)).encode())
    except BaseException:
        hub.close()
        raise
    return hub, invitation


def _await_invitation(rendezvous: Rendezvous, world_size: int, timeout_s: float) -> _Invitation:
    try:
        invitation = _Invitation(**json.loads(rendezvous.get(HUB_KEY, timeout_s)))
    except TimeoutError as error:
        cause = (
            f"it did not make this call within {timeout_s:g} s of this rank: it must be made on every rank of the "
            "process group"
        )
        raise RankFailedError("connecting", 0, world_size, "unknown", cause) from error
    except OSError as error:
        cause = (
            f"the store of the process group, through which it is found, is gone (inferred): {describe_error(error)}"
        )
        raise RankFailedError("connecting", 0, world_size, "unknown", cause) from error
    if invitation.error:
        raise RankFailedError("connecting", 0, world_size, invitation.host, invitation.error)
    return invitation


def _reach(invitation: _Invitation, world_size: int, host: Host, timeout_s: float) -> Link:
    limit_s = min(timeout_s, REACHED_WITHIN_S)
    try:
        if invitation.address == LOOPBACK and invitation.kernel != host.kernel:
            raise ConnectionError(
                f"it listens on {LOOPBACK} and runs on another machine: the store of the process group is a file or "
                'local to it; give init_process_group a store that names a machine, such as init_method="tcp://..."'
            )
        sock = socket.create_connection((invitation.address, invitation.port), timeout=limit_s)
    except OSError as error:
        cause = f"it cannot be reached at {invitation.address}:{invitation.port} (inferred): {describe_error(error)}"
        raise RankFailedError("connecting", 0, world_size, invitation.host, cause) from error
    return Link(sock, world_size=world_size, hub_host=invitation.host, timeout_s=timeout_s)
