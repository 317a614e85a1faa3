"""A file for docker compose and podman-compose: all processes on this machine, each in a container
with no more rights than it needs.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pserver.launcher.manifests.description import (
    KEYS_AT,
    PROBE,
    SCRIPT_AT,
    TMP_MEBIBYTES,
    USER,
    ClusterDescription,
    bytes_of,
    cpus_of,
    serve_command,
    shared_variables,
    train_command,
    trainer_variables,
    yaml_text,
)
from pserver.timeouts import STOP_SECONDS


def compose(cluster: ClusterDescription, folder: Path) -> str:
    """The file.

    Args:
        folder: where it will be; paths in it begin there.
    """
    servers = {f"pserver{number}": _server(cluster) for number in range(cluster.servers)}
    trainers = {
        f"trainer{number}": _trainer(cluster, number, list(servers), folder)
        for number in range(cluster.trainers)
    }
    services = servers | trainers
    document: dict[str, Any] = {"name": cluster.job, "services": services}
    if not cluster.insecure:
        for name, service in services.items():
            service["secrets"] = [{"source": name, "target": Path(KEYS_AT).name}]
        keys = _beside(cluster.keys or "keys", folder)
        document["secrets"] = {name: {"file": "${KEYS:-" + keys + "}/" + name} for name in services}
    if cluster.data_dir:
        document["volumes"] = {"data": {}}
    document["networks"] = {"default": {"internal": True}}  # no way out
    return yaml_text(_comment(cluster, list(services), folder), [document])


def _comment(cluster: ClusterDescription, services: list[str], folder: Path) -> str:
    lines = [
        f"Servers: {cluster.servers}, trainers: {cluster.trainers}, on this machine; written by "
        "`pserver manifest`.",
        "",
    ]
    if cluster.insecure:
        lines += ["No keys: what travels between the containers is not encrypted.", ""]
    else:
        keys = _beside(cluster.keys or "keys", folder)
        lines += [
            "Each process has keys of its own.  Once, from this file's folder:",
            "",
            f"  pserver keys init {keys} --hosts {','.join(services)}",
            "",
            "Only their owner can read them: start the containers as him, by PSERVER_USER.",
            "",
        ]
    lines += [
        '  PSERVER_USER="$(id -u):$(id -g)" docker compose -f THIS_FILE up',
        "",
        "All end by themselves when the trainers have finished.  `down` ends them sooner.",
    ]
    return "\n".join(lines)


def _beside(path: str, folder: Path) -> str:
    """A path as the file names it."""
    if os.path.isabs(path):
        return path
    relative = Path(os.path.relpath(path, folder)).as_posix()
    return relative if relative.startswith("../") else f"./{relative}"


def _hardened(cluster: ClusterDescription) -> dict[str, Any]:
    """A container's rights: to write to /tmp and to the volume, as a user without privileges."""
    bounds: dict[str, Any] = {"cpus": cpus_of(cluster.cpus)} if cluster.cpus else {}
    if cluster.memory:
        bounds["mem_limit"] = f"{bytes_of('--memory', cluster.memory)}b"
    return {
        "image": cluster.image or "pserver",
        "user": "${PSERVER_USER:-" + f"{USER}:{USER}" + "}",
        "read_only": True,
        "tmpfs": [f"/tmp:size={TMP_MEBIBYTES}m,mode=1777"],
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "init": True,
        "restart": "no",  # a job does not survive the restart of one of its processes
        "stop_grace_period": f"{STOP_SECONDS}s",
        **bounds,
    }


def _literal(words: list[str]) -> list[str]:
    """Words in which Compose replaces no variable."""
    return [word.replace("$", "$$") for word in words]


def _volumes(cluster: ClusterDescription) -> list[str]:
    return [f"data:{cluster.data_dir}"] if cluster.data_dir else []


def _server(cluster: ClusterDescription) -> dict[str, Any]:
    volumes = _volumes(cluster)
    return {
        **_hardened(cluster),
        "command": _literal([*serve_command(cluster), "--once"]),
        "environment": shared_variables(cluster),
        **({"volumes": volumes} if volumes else {}),
        "healthcheck": {
            "test": " ".join(PROBE),
            "interval": "10s",
            "timeout": "10s",
            "start_period": "30s",
            "retries": 3,
        },
    }


def _trainer(
    cluster: ClusterDescription, number: int, servers: list[str], folder: Path
) -> dict[str, Any]:
    volumes = _volumes(cluster)
    if not cluster.in_image:
        name = Path(cluster.script).name
        volumes.append(f"{_beside(cluster.script, folder)}:{SCRIPT_AT}/{name}:ro")
    return {
        **_hardened(cluster),
        "command": _literal(train_command(cluster)),
        "environment": {**trainer_variables(cluster), "TRAINER_ID": str(number)},
        "depends_on": {name: {"condition": "service_healthy"} for name in servers},
        "healthcheck": {"disable": True},  # it listens on no port
        **({"volumes": volumes} if volumes else {}),
        **({"deploy": _gpus(cluster.gpus)} if cluster.gpus else {}),
    }


def _gpus(count: int) -> dict[str, Any]:
    device = {"driver": "nvidia", "count": count, "capabilities": ["gpu"]}
    return {"resources": {"reservations": {"devices": [device]}}}
