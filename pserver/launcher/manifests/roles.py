"""The processes of a job in containers: what each runs, and with which variables."""

from __future__ import annotations

from pathlib import Path

from pserver.launcher.manifests.description import ClusterDescription

CONTROL, DATA = 6174, 6175  # ports of a server; a container has them for itself
KEYS_AT = "/run/secrets/keys"
SCRIPT_AT = "/job"  # the folder of a script that is in no image
USER = 10001  # of the image
GRACE_SECONDS = 30  # a process that is told to end does so in 10
TMP_MEBIBYTES = 256
PROBE = ["pserver", "status", "--ready", f"localhost:{CONTROL}"]


def serve_command(cluster: ClusterDescription) -> list[str]:
    """What a server runs, but for when it ends."""
    command = ["pserver", "serve", "--endpoint", f"0.0.0.0:{CONTROL}", "--data-port", str(DATA)]
    if cluster.data_dir:
        command += ["--data-dir", cluster.data_dir]
    if cluster.metrics:
        command += ["--metrics", f"0.0.0.0:{cluster.metrics}"]
    return [*command, "--start-timeout", f"{cluster.start_timeout_seconds:g}"]


def train_command(cluster: ClusterDescription) -> list[str]:
    """What a trainer runs."""
    script = cluster.script
    if not cluster.in_image:
        script = f"{SCRIPT_AT}/{Path(cluster.script).name}"
    return ["python", script, *cluster.arguments]


def shared_variables(cluster: ClusterDescription) -> dict[str, str]:
    """The variables of servers and trainers."""
    protected = {"PSERVER_INSECURE": "1"} if cluster.insecure else {"PSERVER_KEYS": KEYS_AT}
    return {
        **protected,
        "PSERVER_JOB": cluster.job,
        "OMP_NUM_THREADS": str(cluster.threads),
    }


def trainer_variables(cluster: ClusterDescription) -> dict[str, str]:
    """The variables of trainers, but for their number."""
    hosts = [cluster.server_host(number) for number in range(cluster.servers)]
    metrics = {"PSERVER_METRICS": f"0.0.0.0:{cluster.metrics}"} if cluster.metrics else {}
    return {
        **shared_variables(cluster),
        "TRAINING_ROLE": "TRAINER",
        "PSERVER_ENDPOINTS": ",".join(f"{host}:{CONTROL}" for host in hosts),
        "TRAINERS": str(cluster.trainers),
        "PSERVER_START_TIMEOUT": f"{cluster.start_timeout_seconds:g}",
        **metrics,
        **cluster.checkpoint_variables,
    }
