"""Promises of the list of ports: it is complete, and what it calls unprotected asks for a word."""

from __future__ import annotations

import re

import pytest

from pserver.security.access import PORTS
from tests.support.sources import ROOT
from trainer.environment.environment import Connection, World

OPENS = re.compile(
    r"\b(create_server|listening_socket|add_\w*secure_port|TCPStore|listening\.bind|_Server)\("
)
# Files that open a port, and the rows of the table that they belong to.
OPENERS = {
    "pserver/telemetry/metrics.py": "metrics",
    "pserver/web/server.py": "web",
    "pserver/launcher/cluster.py": "rendezvous",  # looks whether one is free
    "pserver/security/enrolment.py": "enrolment",
    "pserver/transport/endpoint.py": "control",
    "pserver/transport/grpc_security.py": "control",
    "pserver/transport/shm.py": "shared memory",
    "pserver/transport/tcp.py": "tensors",
    "pserver/transport/strangers.py": "control",
    "trainer/collective/rendezvous.py": "rendezvous",
    "trainer/collective/spawn.py": "rendezvous",
}


def test_every_file_that_listens_has_a_row() -> None:
    """A new one needs a row in the table, and a line here."""
    found = {
        path.relative_to(ROOT).as_posix()
        for package in ("pserver", "trainer")
        for path in (ROOT / package).rglob("*.py")
        if OPENS.search(path.read_text(encoding="utf-8"))
    }

    assert found == set(OPENERS)
    assert {name for name in OPENERS.values() if name} <= {port.name for port in PORTS}


@pytest.mark.parametrize("host", ["10.0.0.1", "a", "0.0.0.0"])
def test_trainers_of_several_hosts_need_a_word(host: str) -> None:
    """The message says what to do."""
    with pytest.raises(ValueError, match="set PSERVER_INSECURE_COLLECTIVE=1 for every trainer"):
        Connection().check_collective(host)
    Connection(insecure_collective=True).check_collective(host)
    Connection.from_environment({"PSERVER_INSECURE_COLLECTIVE": "1"}).check_collective(host)
    Connection().check_collective("127.0.0.1")


def test_trainers_of_one_host_need_none() -> None:
    """torchrun names the host by its name there, too."""
    names = {"RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}

    for size, all_here in (("2", True), ("1", False), (None, False)):
        local = {} if size is None else {"LOCAL_WORLD_SIZE": size}
        assert World.from_environment(names | {"WORLD_SIZE": "2"} | local).all_here is all_here
