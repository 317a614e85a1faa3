"""Every port that the system opens: the table of docs/ports.md.

A test holds it against the sockets of running jobs.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Port:
    """One port, or a kind of them.

    Attributes:
        name: what it is called in these pages.
        process: which process opens it.
        number: which number it has.
        address: at which of the host's addresses.
        carries: what travels there.
        protected: by what, where keys or a secret are used.
    """

    name: str
    process: str
    number: str
    address: str
    carries: str
    protected: str


PORTS = (
    Port(
        "control",
        "server",
        "`--endpoint`; 0 is any free one",
        "`--endpoint`'s; 127.0.0.1 unless given",
        "control calls and health checks; with transport `grpc` tensors and links of servers too; "
        "checksums without TLS",
        "TLS with keys; a proof of the job's secret",
    ),
    Port(
        "tensors",
        "server",
        "`--data-port`; any free one unless given",
        "`--endpoint`'s",
        "tensors over transport `tcp`; links between the servers of a job; checksums for other "
        "hosts without TLS",
        "TLS 1.3 with keys; a proof of the job's secret",
    ),
    Port(
        "shared memory",
        "server",
        "none: an abstract unix socket `@pserver-NUMBER`",
        "this host (this network namespace)",
        "tensors over transport `shm`; links between the servers of a job; no checksums",
        "the user id of the other process; a proof of the job's secret",
    ),
    Port(
        "metrics",
        "server or trainer",
        "`--metrics`, `PSERVER_METRICS`; none unless given",
        "`--endpoint`'s, a trainer's 127.0.0.1, unless given",
        "counts, durations, names of tables; no values",
        "TLS 1.3 with keys; on loopback nothing; beyond it otherwise only with `--insecure`",
    ),
    Port(
        "web",
        "`pserver web`, `pserver launch --web`",
        "`--port`, `--web`; any free one unless given",
        "127.0.0.1, unless `--host` is given",
        "a page for people: names, counts, the script's own numbers, lines of logs; no tensors",
        "a token in the address; beyond this host TLS 1.3 with keys, or only with `--insecure`",
    ),
    Port(
        "rendezvous",
        "trainer 0 of trainers that exchange tensors among themselves; torchrun's agent",
        "`MASTER_PORT`, a program's first endpoint, or any free one",
        "`MASTER_ADDR`'s",
        "who is there, and what each runs",
        "nothing: beyond loopback only with `--insecure-collective`",
    ),
    Port(
        "gloo",
        "each of these trainers",
        "any free ones",
        "of `GLOO_SOCKET_IFNAME`, or of the host's name",
        "tensors on CPUs",
        "nothing: beyond loopback only with `--insecure-collective`",
    ),
    Port(
        "NCCL",
        "each of these trainers, on GPUs",
        "any free ones",
        "of `NCCL_SOCKET_IFNAME`",
        "tensors on GPUs",
        "nothing: beyond loopback only with `--insecure-collective`",
    ),
    Port(
        "enrolment",
        "`pserver keys enrol`",
        "`--listen`; any free one unless given",
        "`--listen`'s; this host's name unless given",
        "one code, and the certificates for it",
        "TLS 1.3 with the certificate that the code names; ends when the code has come",
    ),
)
