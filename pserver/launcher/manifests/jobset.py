"""A JobSet of Kubernetes: one replicated job of servers, and one of trainers.

Each server is a job of its own with one pod, so a killed server is replaced alone, under the
same name in DNS.  Trainers are the pods of one job, numbered by Kubernetes.  They are made when
every server is ready, and wait for servers besides.

A server that comes back holds no values.  So the trainers' job ends with ``ServerLost``, each
trainer's pod is replaced, and the script resumes from its newest checkpoint.  A pod that a node
evicts does not count, as its process has not failed; others may fail ``--restarts`` times each.
Then the JobSet fails.  JobSet's own action ``RestartJob`` would be no better, and is off in most
clusters.

A server ends with 0 after a request to end, and a job of Kubernetes would take that for success,
and make no other pod.  So a shell stands before the server, passes SIGTERM on, and ends with 1.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pserver.launcher.manifests.description import (
    CONTROL,
    DATA,
    KEYS_AT,
    PROBE,
    SCRIPT_AT,
    TMP_MEBIBYTES,
    USER,
    ClusterDescription,
    serve_command,
    shared_variables,
    train_command,
    trainer_variables,
    yaml_text,
)
from pserver.timeouts import STOP_SECONDS

Object = dict[str, Any]

RESTARTS = 3
STORAGE = "10Gi"
KEY_FILES = ("server.key", "server.pem")  # of each server; the two below are the same for all
PUBLIC_FILES = ("authority.pem", "revoked.pem")
KEY_MODE = 0o440  # the pod's group, which is this user's alone, may read
SERVE = """\
trap 'told=1; kill $server' TERM  # told to end, the server ends with 0, and would not be replaced
"$@" &
server=$!
[ -z "$told" ] || kill $server  # told before it had a number
wait $server
wait $server
exit 1
"""
JOB_INDEX = "metadata.labels['jobset.sigs.k8s.io/job-index']"
POD_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def jobset(cluster: ClusterDescription, folder: Path) -> str:
    """The file.

    Args:
        folder: where it will be; it makes no difference.

    Raises:
        ValueError: the script is too large to come along.
    """
    objects = [_script(cluster)] if not cluster.in_image else []
    if cluster.data_dir:
        objects.append(_claim(cluster))
    return yaml_text(_comment(cluster), [*objects, _jobset(cluster)])


def _comment(cluster: ClusterDescription) -> str:
    job = cluster.job
    lines = [
        f"Servers: {cluster.servers}, trainers: {cluster.trainers}, on Kubernetes; written by "
        "`pserver manifest`.",
        "The cluster needs JobSet (https://jobset.sigs.k8s.io).",
        "",
    ]
    if cluster.insecure:
        lines += ["No keys: what travels between the pods is not encrypted.", ""]
    else:
        hosts = [cluster.server_host(number) for number in range(cluster.servers)]
        lines += [
            "The keys are secrets, which are made once:",
            "",
            "  pserver keys init keys --hosts \\",
            f"      {','.join([*hosts, f'{job}-trainers'])}",
            f"  kubectl create secret generic {job}-server-keys \\",
            *(
                f"      --from-file={number}.{file}=keys/{host}/{file} \\"
                for number, host in enumerate(hosts)
                for file in KEY_FILES
            ),
            *(f"      --from-file=keys/{hosts[0]}/{file} \\" for file in PUBLIC_FILES[:1]),
            f"      --from-file=keys/{hosts[0]}/{PUBLIC_FILES[1]}",
            f"  kubectl create secret generic {job}-trainer-keys --from-file=keys/{job}-trainers",
            "",
        ]
    lines += [
        "  kubectl apply -f THIS_FILE",
        f"  kubectl wait --for=condition=Completed --timeout=1h jobset/{job}",
    ]
    if cluster.data_dir:
        lines += ["", f"`kubectl delete jobset {job}` keeps the volume; `delete -f` does not."]
    return "\n".join(lines)


def _named(cluster: ClusterDescription, kind: str, version: str, name: str) -> Object:
    labels = {"app.kubernetes.io/name": "pserver", "app.kubernetes.io/instance": cluster.job}
    metadata = {"name": name, "labels": labels}
    return {"apiVersion": version, "kind": kind, "metadata": metadata}


def _script(cluster: ClusterDescription) -> Object:
    """The script, as a file that trainers mount."""
    path = Path(cluster.script)
    if path.stat().st_size > 2**20 - 2**14:
        raise ValueError(
            f"{cluster.script}: expected a script below 1 MiB, which is what a ConfigMap holds; "
            "--in-image is for one of the image"
        )
    return {
        **_named(cluster, "ConfigMap", "v1", f"{cluster.job}-script"),
        "data": {path.name: path.read_text(encoding="utf-8")},
    }


def _claim(cluster: ClusterDescription) -> Object:
    """The volume for checkpoints, which servers and trainers share."""
    spec: Object = {
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": cluster.storage or STORAGE}},
    }
    if cluster.storage_class:
        spec["storageClassName"] = cluster.storage_class
    name = f"{cluster.job}-data"
    return {**_named(cluster, "PersistentVolumeClaim", "v1", name), "spec": spec}


def _jobset(cluster: ClusterDescription) -> Object:
    return {
        **_named(cluster, "JobSet", "jobset.x-k8s.io/v1alpha2", cluster.job),
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "successPolicy": {"operator": "All", "targetReplicatedJobs": ["trainers"]},
            "failurePolicy": {
                "maxRestarts": 0,
                "rules": [
                    _fails("aServerHasFailedTooOften", "servers"),
                    _fails("aTrainerHasFailedTooOften", "trainers"),
                ],
            },
            "replicatedJobs": [_servers(cluster), _trainers(cluster)],
        },
    }


def _fails(name: str, job: str) -> Object:
    return {"name": name, "action": "FailJobSet", "targetReplicatedJobs": [job]}


def _servers(cluster: ClusterDescription) -> Object:
    mounts: list[Object] = []
    volumes: list[Object] = []
    environment = _environment(shared_variables(cluster))
    if not cluster.insecure:
        environment.append(_field("SERVER", JOB_INDEX))
        mounts.append(_mount("keys", KEYS_AT, read_only=True, subPathExpr="$(SERVER)"))
        volumes.append(_server_keys(cluster))
    container = {
        "command": ["sh", "-c", SERVE, "sh"],
        "args": serve_command(cluster),
        "env": environment,
        "ports": [
            {"name": "control", "containerPort": CONTROL},
            {"name": "tensors", "containerPort": DATA},
            *_metrics_port(cluster),
        ],
        "readinessProbe": {
            "exec": {"command": PROBE},
            "periodSeconds": 10,
            "timeoutSeconds": 10,
            "failureThreshold": 3,
        },
    }
    job = {
        "backoffLimit": _restarts(cluster),
        "completions": 1,
        "parallelism": 1,
        **_template(cluster, "server", container, mounts, volumes),
    }
    return {"name": "servers", "replicas": cluster.servers, "template": {"spec": job}}


def _trainers(cluster: ClusterDescription) -> Object:
    mounts: list[Object] = []
    volumes: list[Object] = []
    if not cluster.in_image:
        mounts.append(_mount("script", SCRIPT_AT, read_only=True))
        volumes.append({"name": "script", "configMap": {"name": f"{cluster.job}-script"}})
    if not cluster.insecure:
        mounts.append(_mount("keys", KEYS_AT, read_only=True))
        secret = {"secretName": f"{cluster.job}-trainer-keys", "defaultMode": KEY_MODE}
        volumes.append({"name": "keys", "secret": secret})
    container = {
        "command": [word.replace("$(", "$$(") for word in train_command(cluster)],
        "env": [*_environment(trainer_variables(cluster)), _field("TRAINER_ID", POD_INDEX)],
        **({"ports": ports} if (ports := _metrics_port(cluster)) else {}),
    }
    job = {
        "backoffLimitPerIndex": _restarts(cluster),
        "maxFailedIndexes": 0,
        "completions": cluster.trainers,
        "parallelism": cluster.trainers,
        **_template(cluster, "trainer", container, mounts, volumes),
    }
    return {
        "name": "trainers",
        "replicas": 1,
        "dependsOn": [{"name": "servers", "status": "Ready"}],
        "template": {"spec": job},
    }


def _template(
    cluster: ClusterDescription,
    role: str,
    container: Object,
    mounts: list[Object],
    volumes: list[Object],
) -> Object:
    """The rest of a job, which is the same for both roles.

    Args:
        mounts, volumes: of this role alone.
    """
    mounts = [_mount("tmp", "/tmp"), *mounts]
    tmp: Object = {"medium": "Memory", "sizeLimit": f"{TMP_MEBIBYTES}Mi"}
    volumes = [{"name": "tmp", "emptyDir": tmp}, *volumes]
    if cluster.data_dir:
        mounts.append(_mount("data", cluster.data_dir))
        claim = {"claimName": f"{cluster.job}-data"}
        volumes.append({"name": "data", "persistentVolumeClaim": claim})
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": STOP_SECONDS,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,  # a Service called pserver would set PSERVER_ variables
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [
            {
                "name": role,
                "image": cluster.image or "pserver",
                **container,
                **_resources(cluster, cluster.gpus if role == "trainer" else 0),
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    "readOnlyRootFilesystem": True,
                    "capabilities": {"drop": ["ALL"]},
                },
                "volumeMounts": mounts,
            }
        ],
        "volumes": volumes,
    }
    evicted = {"type": "DisruptionTarget", "status": "True"}
    return {
        "completionMode": "Indexed",
        "podFailurePolicy": {"rules": [{"action": "Ignore", "onPodConditions": [evicted]}]},
        "template": {"metadata": _pod_metadata(cluster, role), "spec": pod},
    }


def _pod_metadata(cluster: ClusterDescription, role: str) -> Object:
    labels = {
        "app.kubernetes.io/name": "pserver",
        "app.kubernetes.io/instance": cluster.job,
        "app.kubernetes.io/component": role,
    }
    if not cluster.metrics:
        return {"labels": labels}
    annotations = {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": str(cluster.metrics),
        "prometheus.io/path": "/metrics",
        "prometheus.io/scheme": "http" if cluster.insecure else "https",
    }
    return {"labels": labels, "annotations": annotations}


def _server_keys(cluster: ClusterDescription) -> Object:
    """All servers' keys, of which each mounts its own folder."""
    items = []
    for number in range(cluster.servers):
        items += [{"key": f"{number}.{file}", "path": f"{number}/{file}"} for file in KEY_FILES]
        items += [{"key": file, "path": f"{number}/{file}"} for file in PUBLIC_FILES]
    secret = {
        "secretName": f"{cluster.job}-server-keys",
        "defaultMode": KEY_MODE,
        "items": items,
    }
    return {"name": "keys", "secret": secret}


def _resources(cluster: ClusterDescription, gpus: int) -> Object:
    """A container's resources: its limits are its requests."""
    amounts: Object = {"cpu": cluster.cpus} if cluster.cpus else {}
    if cluster.memory:
        amounts["memory"] = cluster.memory
    if gpus:
        amounts["nvidia.com/gpu"] = str(gpus)
    return {"resources": {"requests": amounts, "limits": amounts}} if amounts else {}


def _restarts(cluster: ClusterDescription) -> int:
    return RESTARTS if cluster.restarts is None else cluster.restarts


def _metrics_port(cluster: ClusterDescription) -> list[Object]:
    return [{"name": "metrics", "containerPort": cluster.metrics}] if cluster.metrics else []


def _environment(variables: dict[str, str]) -> list[Object]:
    return [{"name": name, "value": value} for name, value in variables.items()]


def _field(name: str, path: str) -> Object:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _mount(name: str, path: str, read_only: bool = False, **more: str) -> Object:
    only = {"readOnly": True} if read_only else {}
    return {"name": name, "mountPath": path, **only, **more}
