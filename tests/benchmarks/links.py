"""Rows: two hosts joined by links of 1 or 10 Gbit/s.  Each host is a network namespace
of this machine.

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
    "wire/tcp 1 Gbit/s sync step",
    "DDP on gloo, 2 ranks, same links",
    1.0,
    setting=f"{SETTING}; gradients leave during backward (overlap), as DDP's do",
)
GEO = Promise(
    "wire/tcp 1 Gbit/s k-step, k = 50", "DDP on gloo, 2 ranks, same links", 7, setting=SETTING
)
CONNECTIONS = 4
NEAR, FAR = (
    Promise(
        f"wire/tcp 10 Gbit/s{delay}, 64 MB",
        f"the same bytes one way after the other over {CONNECTIONS} raw sockets",
        0.95,
        setting="2 network namespaces, 1 trainer here and 1 server there with --connections "
        f"{CONNECTIONS}, SGD, 1 thread each",
    )
    for delay in ("", ", 1 ms")
)
LINKS = {SYNC: ("1gbit",), GEO: ("1gbit",), NEAR: ("10gbit",), FAR: ("10gbit", "netem delay 500us")}
PROMISES = tuple(LINKS)
MOST_HOSTS = 8
HOSTS = ("10.77.0.1", "10.77.0.2")
BRIDGE = "pserverbench"


def measure(wanted: Collection[Promise], runs: int, tiny: bool) -> Iterator[Row]:
    """All rows of this file that are wanted; where there can be no namespaces, why not."""
    runs, width = min(runs, 5), 64 if tiny else 2048
    missing = {promise: _missing(*LINKS[promise]) for promise in wanted}
    yield from (Row(promise, skipped=why) for promise, why in missing.items() if why)
    possible = [promise for promise, why in missing.items() if not why]
    if chosen := [promise for promise in possible if promise in (SYNC, GEO)]:
        yield from _training(chosen, runs, width)
    for promise in possible:
        if promise not in (SYNC, GEO):
            yield _moving(promise, runs, *((3, 64) if tiny else (100, 160_000)))


def _moving(promise: Promise, runs: int, count: int, elements: int) -> Row:
    """A step between two hosts."""
    size, flags = count * elements * 4, ["--connections", str(CONNECTIONS)]
    with hosts(*LINKS[promise]) as (here, there), ExitStack() as stack:
        raw = Peer("raw", size, HOSTS[1], CONNECTIONS, prefix=there)
        (port,) = stack.enter_context(peers(raw))
        _, endpoint = stack.enter_context(server("tcp", prefix=there, host=HOSTS[1], flags=flags))
        ours = Peer("mover", endpoint, count, elements, prefix=here)
        bare = Peer("raw_mover", HOSTS[1], port, CONNECTIONS, size, prefix=here)
        stack.enter_context(peers(ours, bare))
        contenders = {"ours": together([ours], 10), "bare": together([bare], 10)}
        medians = alternate(contenders, runs)
    return Row(promise, medians["ours"], medians["bare"], runs)


def _training(wanted: Collection[Promise], runs: int, width: int) -> Iterator[Row]:
    """Whole steps, beside DDP over the same links."""
    with hosts("1gbit") as prefixes, ExitStack() as stack:
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
        ranks = [
            Peer("ddp", rank, 2, HOSTS[0], 29700, width, prefix=prefix)
            for rank, prefix in enumerate(prefixes)
        ]
        stack.enter_context(peers(*ranks))
        contenders = {"others": together(ranks, 3)}
        for promise, configs, steps in ((SYNC, "overlap=1", 3), (GEO, "k_steps=50", 100)):
            if promise not in wanted:
                continue
            endpoints = ",".join(
                stack.enter_context(server("tcp", prefix=prefix, host=host))[1]
                for prefix, host in zip(prefixes, HOSTS, strict=True)
            )
            own = [
                Peer("trainer", n, 2, endpoints, "tcp", width, configs, prefix=p)
                for n, p in enumerate(prefixes)
            ]
            stack.enter_context(peers(*own))
            contenders[promise.name] = together(own, steps)
        medians = alternate(contenders, runs)
    for promise in wanted:
        yield Row(promise, medians[promise.name], medians["others"], runs)


def _missing(*link: str) -> str:
    """Why two hosts with such a link cannot be made here; "" if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"network namespaces need iproute2: there is no {missing[0]}"
    try:
        with hosts(*link):
            return ""
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {error.stderr.decode().strip()}"


def _do(command: str, check: bool = True) -> None:
    subprocess.run(command.split(), check=check, capture_output=True, timeout=30)


@contextmanager
def hosts(
    rate: str, further: str = "", count: int = len(HOSTS), burst: str = "1mb"
) -> Iterator[list[list[str]]]:
    """How to run a command on each of some hosts, 10.77.0.1 and so on; they are gone afterwards,
    and what an earlier run left before.

    Args:
        rate: of each link, each way.
        further: a queueing discipline behind that, of each host's own end.
        count: how many, up to MOST_HOSTS.
        burst: what leaves at once after a pause.
    """
    os.environ["PSERVER_INSECURE"] = "1"  # nobody else is on these links
    _remove()
    try:
        _do(f"ip link add {BRIDGE} type bridge")
        _do(f"ip link set {BRIDGE} up")
        for number in range(count):
            host = f"10.77.0.{number + 1}"
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
                _do(
                    f"{prefix}tc qdisc add dev {device} root handle 1: tbf rate {rate} "
                    f"burst {burst} latency 50ms"
                )
            if further:
                _do(
                    f"ip netns exec {name} tc qdisc add dev eth0 parent 1:1 handle 10: {further} "
                    "limit 100000"
                )
        yield [["ip", "netns", "exec", f"bench{number}"] for number in range(count)]
    finally:
        _remove()


def _remove() -> None:
    for number in range(MOST_HOSTS):
        _do(f"ip netns del bench{number}", check=False)
    _do(f"ip link del {BRIDGE}", check=False)
