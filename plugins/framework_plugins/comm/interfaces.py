"""Network interfaces of this host, and what each backend's variable makes of them.

gloo (torch 2.13, tried): a comma list of exact names, each with an IP address. Empty or one character: as if not set.
NCCL (its manual, `NCCL_SOCKET_IFNAME`): a comma list of prefixes; `=` in front: exact names; `^` in front: all but
those; `:port` may follow a name. At least one interface with an IP address must match. One character: as if not set.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping

import psutil

Interfaces = Mapping[str, tuple[str, ...]]
"""Name -> IP addresses; empty if it has none (a backend can't use it)."""


def host_interfaces() -> dict[str, tuple[str, ...]]:
    """Return the interfaces of this host, in their own order."""
    ip = (socket.AF_INET, socket.AF_INET6)
    return {
        name: tuple(address.address.partition("%")[0] for address in addresses if address.family in ip)
        for name, addresses in psutil.net_if_addrs().items()
    }


def listing(interfaces: Interfaces) -> str:
    """Return `lo (127.0.0.1), eth0 (10.0.0.2)`; those without an address last, and told so."""
    usable = [f"{name} ({addresses[0]})" for name, addresses in interfaces.items() if addresses]
    return ", ".join([*usable, *(f"{name} (no address)" for name, addresses in interfaces.items() if not addresses)])


def gloo_complaint(value: str, interfaces: Interfaces) -> str | None:
    """Return why gloo can't use `value` as GLOO_SOCKET_IFNAME, or None."""
    if not value:
        return None
    if len(value) == 1 and value not in interfaces:
        return "torch ignores a name of one character"
    if value[0] in "^=":
        return f"gloo takes exact names only; {value[0]!r} is NCCL's grammar"
    for name in value.split(","):
        if name and (complaint := _unusable(name, interfaces)):
            return complaint
    return None


def nccl_complaint(value: str, interfaces: Interfaces) -> str | None:
    """Return why NCCL can't use `value` as NCCL_SOCKET_IFNAME, or None."""
    if not value:
        return None
    if len(value) == 1:
        return "NCCL ignores a name of one character"
    exclude = value.startswith("^")
    exact = value.removeprefix("^").startswith("=")
    names = [name.partition(":")[0] for name in value.removeprefix("^").removeprefix("=").split(",") if name]
    usable = [name for name, addresses in interfaces.items() if addresses]

    def matches(interface: str, name: str) -> bool:
        return interface == name if exact else interface.startswith(name)

    if exclude:
        left = [interface for interface in usable if not any(matches(interface, name) for name in names)]
        return None if left else "it excludes every interface that has an address"
    for name in names:
        if not any(matches(interface, name) for interface in usable):
            return _unusable(name, interfaces) or f"no interface is named {name}"
    return None


def _unusable(name: str, interfaces: Interfaces) -> str | None:
    """Return why `name` isn't the exact name of an interface with an address, or None."""
    if interfaces.get(name):
        return None
    if name in interfaces:
        return f"interface {name} has no IP address"
    try:
        address = str(ipaddress.ip_address(name))
    except ValueError:
        return f"there is no interface {name!r}"
    owner = next((interface for interface, addresses in interfaces.items() if address in addresses), None)
    return f"{name} is an address, not an interface" + (f" (that of {owner})" if owner else "")
