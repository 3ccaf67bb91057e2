"""`framework.process_groups`: what needs no group."""

from __future__ import annotations

import socket
from pathlib import Path

from framework.process_groups import lasting_port


def test_a_lasting_port_is_free_and_none_that_the_system_gives_away() -> None:
    ports = {lasting_port() for _ in range(20)}
    assert len(ports) > 15
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(1024 <= port < first for port in ports)
    with socket.create_server(("127.0.0.1", ports.pop())):
        pass
