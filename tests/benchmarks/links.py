"""Rows: two hosts joined by links of 1 Gbit/s.  Each host is a network namespace of this machine.

bench0 10.77.0.1 --veth, tbf-- bridge --veth, tbf-- bench1 10.77.0.2
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager

from harness import Promise, Row, alternate
from processes import Peer, peers, server
from steps import together

SETTING = (
    "2 network namespaces, 1 trainer and 1 server each; 16 MB model of two wide layers, "
    "batch 16, SGD, 1 thread each"
)
SYNC = Promise(
    "wire/flight 1 Gbit/s sync step", "DDP on gloo, 2 ranks, same links", 0.9, setting=SETTING
)
GEO = Promise(
    "wire/flight 1 Gbit/s k-step, k = 50", "DDP on gloo, 2 ranks, same links", 7, setting=SETTING
)
PROMISES = (SYNC, GEO)
HOSTS = ("10.77.0.1", "10.77.0.2")
BRIDGE = "pserverbench"


def measure(wanted: Collection[Promise], runs: int, tiny: bool) -> Iterator[Row]:
    """All rows of this file that are wanted; where there can be no namespaces, why not."""
    runs, width = min(runs, 5), 64 if tiny else 2048
    why = _missing()
    if why:
        yield from (Row(promise, skipped=why) for promise in wanted)
        return
    with _hosts() as prefixes, ExitStack() as stack:
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
        ranks = [
            Peer("ddp", rank, 2, HOSTS[0], 29700, width, prefix=prefix)
            for rank, prefix in enumerate(prefixes)
        ]
        stack.enter_context(peers(*ranks))
        contenders = {"others": together(ranks, 3)}
        for promise, configs, steps in ((SYNC, "", 3), (GEO, "k_steps=50", 100)):
            if promise not in wanted:
                continue
            endpoints = ",".join(
                stack.enter_context(server("flight", prefix=prefix, host=host))[1]
                for prefix, host in zip(prefixes, HOSTS, strict=True)
            )
            own = [
                Peer("trainer", n, 2, endpoints, "flight", width, configs, prefix=p)
                for n, p in enumerate(prefixes)
            ]
            stack.enter_context(peers(*own))
            contenders[promise.name] = together(own, steps)
        medians = alternate(contenders, runs)
    for promise in wanted:
        yield Row(promise, medians[promise.name], medians["others"], runs)


def _missing() -> str:
    """Why two hosts cannot be made here; "" if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"network namespaces need iproute2: there is no {missing[0]}"
    try:
        with _hosts():
            return ""
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {error.stderr.decode().strip()}"


def _do(command: str, check: bool = True) -> None:
    subprocess.run(command.split(), check=check, capture_output=True, timeout=30)


@contextmanager
def _hosts() -> Iterator[list[list[str]]]:
    """How to run a command on each of the two hosts; they are gone afterwards, and what an earlier
    run left before.
    """
    _remove()
    try:
        _do(f"ip link add {BRIDGE} type bridge")
        _do(f"ip link set {BRIDGE} up")
        for number, host in enumerate(HOSTS):
            name, link = f"bench{number}", f"benchlink{number}"
            _do(f"ip netns add {name}")
            _do(f"ip link add {link} type veth peer name eth0 netns {name}")
            _do(f"ip link set {link} master {BRIDGE} up")
            for command in (
                f"ip addr add {host}/24 dev eth0",
                "ip link set eth0 up",
                "ip link set lo up",
            ):
                _do(f"ip netns exec {name} {command}")
            for prefix, device in ((f"ip netns exec {name} ", "eth0"), ("", link)):  # both ways
                _do(f"{prefix}tc qdisc add dev {device} root tbf rate 1gbit burst 1mb latency 50ms")
        yield [["ip", "netns", "exec", f"bench{number}"] for number in range(len(HOSTS))]
    finally:
        _remove()


def _remove() -> None:
    for number in range(len(HOSTS)):
        _do(f"ip netns del bench{number}", check=False)
    _do(f"ip link del {BRIDGE}", check=False)
