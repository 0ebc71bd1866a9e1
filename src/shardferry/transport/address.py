"""The address of this machine that other ranks can reach, as far as an address they all reach tells it."""

from __future__ import annotations

import functools
import ipaddress
import socket

from shardferry.transport.connect import LOOPBACK

# An address that is never assigned (RFC 5737): asking for the way to it gives the address on the default route, and a
# UDP socket sends nothing to find out.
UNASSIGNED_ADDRESS = "192.0.2.1"


def address_towards(host: str, port: int) -> str:
    """Return this host's address on the way to a server that all ranks reach.

    The other ranks come from there too, so it is good for them.
    """
    address = _address_on_way_to(host, port) or LOOPBACK
    # Some distributions map a machine's own name to the loopback address; the other machines know better.
    if ipaddress.ip_address(address).is_loopback and not _means_loopback(host):
        return _address_on_way_to(UNASSIGNED_ADDRESS, port) or address
    return address


def _means_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@functools.cache  # a look-up may take seconds, and the way does not change while a job runs
def _address_on_way_to(host: str, port: int) -> str | None:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, target in found:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.connect(target)
            except OSError:
                continue  # no way to this one; the next may have
            return str(probe.getsockname()[0])
    return None
