"""The job that a manifest describes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from pserver.config import check_seconds
from pserver.launcher.cluster import variables_of

# ---- credentials ----
#
# Arguments of a script that hold a password or a key: a manifest is a file that many may read.


# "--tokens" and "--pad-token" are words of a language model, "--token" and "--hf-token" are not
NAMES = re.compile(
    r"(.*[-_])?(password|passwd|secret|credentials|(api|access|private|secret)[-_]?key)"
    r"|((hf|api|auth|access|bearer)[-_])?token",
    re.IGNORECASE,
)
URL = re.compile(r"://[^/@\s]*:[^/@\s]*@")  # scheme://user:password@host


def refuse_credentials(arguments: Sequence[str]) -> None:
    """Returns if no argument looks like a secret.

    Raises:
        ValueError: one does; the message does not repeat it.
    """
    for argument in arguments:
        flag = argument.partition("=")[0]
        named = flag.startswith("-") and NAMES.fullmatch(flag.lstrip("-"))
        if named or URL.search(argument):
            what = flag if named else "a URL with a password"
            raise ValueError(
                f"{what}: expected no secret among the script's arguments, as everyone who can "
                "read the manifest reads them; give it to the script by a file or a variable"
            )


# ---- quantities ----
#
# What a process gets of a machine, as Kubernetes writes it: ``500m`` or ``2`` CPUs, ``4Gi``.


UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def cpus_of(text: str) -> float:
    """CPUs: ``"2"`` is 2.0 and ``"500m"`` 0.5.

    Raises:
        ValueError: it is neither a whole number above 0 nor thousandths.
    """
    found = re.fullmatch(r"([1-9][0-9]*)(m?)", text)
    if found is None:
        raise ValueError(
            f"--cpus: expected a whole number above 0, or thousandths as in 500m, got {text!r}"
        )
    return int(found[1]) / (1000 if found[2] else 1)


def bytes_of(flag: str, text: str) -> int:
    """Bytes: ``"4Gi"`` is 4 * 2**30.

    Args:
        flag: what the user has written it with.

    Raises:
        ValueError: it is no whole number of one of these units.
    """
    found = re.fullmatch(r"([1-9][0-9]*)(Ki|Mi|Gi|Ti)", text)
    if found is None:
        raise ValueError(
            f"{flag}: expected a whole number with Ki, Mi, Gi or Ti behind it, as in 4Gi, got "
            f"{text!r}"
        )
    return int(found[1]) * UNITS[found[2]]


# ---- description ----


KINDS = ("jobset", "compose", "slurm")
CONTAINERS = ("jobset", "compose")
# Settings that some kinds have no use for.
BELONGS = {
    "image": CONTAINERS,
    "in_image": CONTAINERS,
    "storage": ("jobset",),
    "storage_class": ("jobset",),
    "restarts": ("jobset", "slurm"),
    "keys": ("compose", "slurm"),
}
LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
MOST_LABEL = 63
POD_SUFFIX = "-abcde"  # the characters that Kubernetes puts behind a pod's name
MOST_PROCESSES = 65536


@dataclass(frozen=True, slots=True)
class ClusterDescription:
    """The arguments of ``pserver manifest``.

    Example::

        ClusterDescription("compose", "train.py", (), servers=2, trainers=4, name="clicks")

    Attributes:
        kind: one of ``KINDS``.
        script, arguments: what each trainer runs.
        servers, trainers: how many of each, 1 or more.
        name: of the job, a label of DNS; "": as the script is called.
        image: the containers' image; "": ``pserver``.
        in_image: the script is a file of the image, by its path there; otherwise it is a file here,
            which comes along.
        cpus, memory: of each process, as in "2" and "4Gi"; "": no bound.
        gpus: of each trainer.
        data_dir: the directory for checkpoints and for rows on disk, in every process; "": none.
        storage, storage_class: of the volume behind it, in Kubernetes; "": 10Gi, and the cluster's
            own class.
        metrics: a port; each container's own, of all processes of Slurm the first; 0: no metrics.
        keys: the folder that ``pserver keys init`` has made; "": ``./keys`` for Compose, and for
            Slurm a secret of the job itself, on one host.  In Kubernetes keys are always secrets.
        insecure: processes have no keys, on a network that no one else reaches.
        start_timeout_seconds: how long the processes wait for one another to come up.
        restarts: how often each pod of Kubernetes is replaced after a failure, None: 3 times; how
            often all processes of a job of Slurm are started again, None: never.
        checkpoint: the folder, or the URL, where the job saves by itself; "": nowhere.
        every: seconds between two checkpoints; None: 600.
        keep: how many of them stay; None: 3.

    Raises:
        ValueError: something is wrong, missing, or has no effect with this kind; one sentence.
    """

    kind: str
    script: str
    arguments: tuple[str, ...]
    servers: int
    trainers: int
    name: str = ""
    image: str = ""
    in_image: bool = False
    cpus: str = ""
    memory: str = ""
    gpus: int = 0
    data_dir: str = ""
    storage: str = ""
    storage_class: str = ""
    metrics: int = 0
    keys: str = ""
    insecure: bool = False
    start_timeout_seconds: float = 300.0
    restarts: int | None = None
    checkpoint: str = ""
    every: float | None = None
    keep: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"--kind: expected one of {', '.join(KINDS)}, got {self.kind!r}")
        self._check_effects()
        for flag, count in (("--servers", self.servers), ("--trainers", self.trainers)):
            if not 1 <= count <= MOST_PROCESSES:
                raise ValueError(f"{flag}: expected 1 to {MOST_PROCESSES}, got {count}")
        self._check_script()
        self._check_name()
        self._check_resources()
        self._check_data()
        if self.keys and self.insecure:
            raise ValueError("--insecure: expected this or --keys, got both")
        check_seconds("--start-timeout", self.start_timeout_seconds)
        refuse_credentials(self.arguments)

    def _check_effects(self) -> None:
        defaults = {field.name: field.default for field in fields(self)}
        for setting, kinds in BELONGS.items():
            if self.kind not in kinds and getattr(self, setting) != defaults[setting]:
                flag = "--" + setting.replace("_", "-")
                raise ValueError(f"{flag}: has no effect with --kind {self.kind}")

    def _check_script(self) -> None:
        if self.in_image:
            if not PurePosixPath(self.script).is_absolute():
                raise ValueError(
                    "--in-image: expected the script's whole path in the image, as in "
                    f"/srv/train.py, got {self.script!r}"
                )
        elif not Path(self.script).is_file():
            also = "; --in-image is for one of the image" if self.kind in CONTAINERS else ""
            raise ValueError(
                f"expected a script to run, and there is no file {self.script!r}{also}"
            )

    def _check_name(self) -> None:
        if not LABEL.fullmatch(self.job) or len(self.longest_name) > MOST_LABEL:
            room = MOST_LABEL - (len(self.longest_name) - len(self.job))
            raise ValueError(
                f"--name: expected up to {room} small letters, digits and '-', with a letter "
                f"first and no '-' at the end, got {self.job!r}"
            )

    def _check_resources(self) -> None:
        if self.cpus and cpus_of(self.cpus) % 1 and self.kind == "slurm":
            raise ValueError(
                f"--cpus: Slurm gives whole ones; expected such a number, got {self.cpus}"
            )
        if self.memory:
            bytes_of("--memory", self.memory)
        if self.gpus < 0:
            raise ValueError(f"--gpus: expected 0 or more, got {self.gpus}")
        processes = self.servers + self.trainers if self.kind == "slurm" else 1
        if self.metrics and not 1 <= self.metrics <= 65536 - processes:
            raise ValueError(
                f"--metrics: expected a port of 1 to {65536 - processes}, got {self.metrics}"
            )
        if self.restarts is not None and self.restarts < 0:
            raise ValueError(f"--restarts: expected 0 or more, got {self.restarts}")

    def _check_data(self) -> None:
        if self.data_dir and not PurePosixPath(self.data_dir).is_absolute():
            raise ValueError(f"--data-dir: expected a whole path, got {self.data_dir!r}")
        for flag, text in (("--storage", self.storage), ("--storage-class", self.storage_class)):
            if text and not self.data_dir:
                raise ValueError(f"{flag}: has no effect without --data-dir")
        if self.storage:
            bytes_of("--storage", self.storage)

        self._check_checkpoints()

    def _check_checkpoints(self) -> None:
        variables_of(self.checkpoint or None, self.every, self.keep)  # which checks them
        path = PurePosixPath(self.checkpoint)
        if not self.checkpoint or "://" in self.checkpoint:
            return
        if not path.is_absolute():
            raise ValueError(f"--checkpoint: expected a whole path or a URL, got {path}")
        if self.kind in CONTAINERS and not (self.data_dir and path.is_relative_to(self.data_dir)):
            raise ValueError(
                f"--checkpoint: expected a URL, or a folder below --data-dir, which outlives a "
                f"container, got {path}"
            )

    @property
    def checkpoint_variables(self) -> dict[str, str]:
        """The variables by which trainers learn where they save by themselves."""
        return variables_of(self.checkpoint or None, self.every, self.keep)

    @property
    def job(self) -> str:
        """The job's name."""
        return self.name or Path(self.script).stem.lower().replace("_", "-")

    @property
    def longest_name(self) -> str:
        """The longest label that is made of the job's name."""
        if self.kind != "jobset":
            return self.job
        server = self.server_host(self.servers - 1).partition(".")[0]
        return max(server, f"{self.job}-trainers-0-{self.trainers - 1}", key=len) + POD_SUFFIX

    def server_host(self, number: int) -> str:
        """The host name by which containers reach a server."""
        if self.kind == "jobset":
            return f"{self.job}-servers-{number}-0.{self.job}"
        return f"pserver{number}"

    @property
    def threads(self) -> int:
        """torch's threads of a process."""
        return max(1, int(cpus_of(self.cpus))) if self.cpus else 1


# ---- roles ----
#
# The processes of a job in containers: what each runs, and with which variables.


CONTROL, DATA = 6174, 6175  # ports of a server; a container has them for itself
KEYS_AT = "/run/secrets/keys"
SCRIPT_AT = "/job"  # the folder of a script that is in no image
USER = 10001  # of the image
TMP_MEBIBYTES = 256
PROBE = ["pserver", "status", "--ready", f"localhost:{CONTROL}"]


def serve_command(cluster: ClusterDescription) -> list[str]:
    """A server's command, without its end."""
    command = ["pserver", "serve", "--endpoint", f"0.0.0.0:{CONTROL}", "--data-port", str(DATA)]
    if cluster.data_dir:
        command += ["--data-dir", cluster.data_dir]
    if cluster.metrics:
        command += ["--metrics", f"0.0.0.0:{cluster.metrics}"]
    return [*command, "--start-timeout", f"{cluster.start_timeout_seconds:g}"]


def train_command(cluster: ClusterDescription) -> list[str]:
    """A trainer's command."""
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


# ---- yaml text ----
#
# Plain dicts and lists as YAML that people read: in the order of the dicts, with texts of several
# lines as blocks, and short lists and dicts on one line.


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # PyYAML has no annotations
    """Writes lists indented, and every value where it stands: no anchors."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def yaml_text(comment: str, documents: Sequence[dict[str, Any]]) -> str:
    """A file of some documents.

    Args:
        comment: its first lines, without ``#``.
    """
    head = "".join(f"# {line}".rstrip() + "\n" for line in comment.splitlines())
    written = [
        yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=100, default_flow_style=None)
        for document in documents
    ]
    return head + "---\n".join(written)
