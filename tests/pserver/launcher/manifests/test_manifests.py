"""Promises of ``pserver manifest``: what it writes stays as it is, is what Kubernetes and the
command line take, and holds no secret.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from pserver.__main__ import main
from pserver.cli import flags
from pserver.cli.flags import parser
from pserver.launcher.manifests import description
from pserver.launcher.manifests.jobset import SERVE
from pserver.security.key_folder import check_host
from tests.support.manifests import CASES, EXAMPLES, at_small_job, written
from tests.support.pages import ROOT
from tests.support.transcript import compare

JOBSETS = [name for name in CASES if "jobset" in name]


@pytest.fixture(autouse=True)
def small_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test is in a folder with a script."""
    at_small_job(tmp_path, monkeypatch)


@pytest.fixture
def jobset(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> list[Any]:
    """The documents of a file for Kubernetes; the parameter names it."""
    return list(yaml.safe_load_all(written(CASES[request.param], capsys)))


def containers(documents: list[Any]) -> dict[str, dict[str, Any]]:
    """By replicated job, its pods' container."""
    jobs = documents[-1]["spec"]["replicatedJobs"]
    pods = {job["name"]: job["template"]["spec"]["template"]["spec"] for job in jobs}
    return {name: pod["containers"][0] for name, pod in pods.items()}


@pytest.mark.parametrize("name", CASES)
def test_a_manifest_stays_as_it_is(
    name: str, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    """To the letter: see tests/testdata/manifests."""
    compare(request, f"manifests/{name}", written(CASES[name], capsys))


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_are_what_the_command_writes(
    name: str,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those in deploy/, whose commands its page has."""
    monkeypatch.chdir(ROOT)
    page = (ROOT / "deploy" / "README.md").read_text(encoding="utf-8")
    words = page.replace("\\\n", " ").split()

    compare(request, f"../../deploy/{name}", written(EXAMPLES[name], capsys))
    assert f"manifest {EXAMPLES[name]}" in " ".join(words)


@pytest.mark.parametrize("jobset", JOBSETS, indirect=True)
def test_kubernetes_takes_the_objects(jobset: list[Any]) -> None:
    """By the schemas of its own API: the script, the volume, and the jobs of both roles."""
    validator = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate checks it")
    jobs = [
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "a"}, **job["template"]}
        for job in jobset[-1]["spec"]["replicatedJobs"]
    ]

    for each in (*jobset[:-1], *jobs):
        validator.validate(each, validator.latest_version(), strict=True)
    with pytest.raises(validator.ValidationError):
        validator.validate({**jobs[0], "spec": {"pods": 3}}, validator.latest_version(), True)


@pytest.mark.parametrize("jobset", JOBSETS, indirect=True)
def test_jobset_takes_the_file(jobset: list[Any]) -> None:
    """By the schema of its custom resource definition, where JOBSET_CRD names that file."""
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema checks it")
    if not (definition := os.environ.get("JOBSET_CRD")):
        pytest.skip("JOBSET_CRD names no file with JobSet's custom resource definition")
    validator = jsonschema.Draft202012Validator(schema_of(definition))

    validator.validate(jobset[-1])
    jobset[-1]["spec"]["replicatedJob"] = []
    with pytest.raises(jsonschema.ValidationError, match="'replicatedJob' was unexpected"):
        validator.validate(jobset[-1])


@functools.cache
def schema_of(definition: str) -> Any:
    """The schema in a custom resource definition, which is a large file."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    found = yaml.load(Path(definition).read_text("utf-8"), loader)
    (version,) = found["spec"]["versions"]
    return closed(version["schema"]["openAPIV3Schema"])


def closed(schema: Any) -> Any:
    """A schema that takes no property that it does not name."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: closed(value) for key, value in schema.items()}
    if "properties" in made and "additionalProperties" not in made and "type" in made:
        made["additionalProperties"] = False
    return made


@pytest.mark.parametrize("jobset", JOBSETS, indirect=True)
def test_pods_have_no_privilege(jobset: list[Any]) -> None:
    """No root, no capability and none to gain, a root file system that is read-only; keys are
    read-only, too.
    """
    for job in jobset[-1]["spec"]["replicatedJobs"]:
        pod = job["template"]["spec"]["template"]["spec"]
        (container,) = pod["containers"]

        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["automountServiceAccountToken"] is False
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert pod["terminationGracePeriodSeconds"] > 10
        mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
        assert "keys" not in mounts or mounts["keys"]["readOnly"] is True
        assert {volume["name"] for volume in pod["volumes"]} == set(mounts)


@pytest.mark.parametrize("jobset", JOBSETS, indirect=True)
def test_trainers_know_the_names_that_servers_have(jobset: list[Any]) -> None:
    """Those of JobSet in DNS, at the port that servers listen on and that the probe asks."""
    name, jobs = jobset[-1]["metadata"]["name"], jobset[-1]["spec"]["replicatedJobs"]
    found = containers(jobset)
    environment = {each["name"]: each.get("value") for each in found["trainers"]["env"]}
    arguments = parser().parse_args(found["servers"]["args"][1:])
    port = arguments.endpoint.rpartition(":")[2]

    assert environment["PSERVER_ENDPOINTS"].split(",") == [
        f"{name}-servers-{number}-0.{name}:{port}" for number in range(jobs[0]["replicas"])
    ]
    for host in environment["PSERVER_ENDPOINTS"].split(","):
        check_host(host.partition(":")[0])  # `pserver keys init` takes it
    assert int(environment["TRAINERS"]) == jobs[1]["template"]["spec"]["completions"]
    assert jobs[1]["dependsOn"] == [{"name": "servers", "status": "Ready"}]
    probe = found["servers"]["readinessProbe"]["exec"]["command"]
    assert parser().parse_args(probe[1:]).endpoints == f"localhost:{port}"


@pytest.mark.processes
def test_a_server_that_is_told_to_end_fails_its_pod() -> None:
    """It may end in its own time, and with 0: Kubernetes must not take that for success."""
    child = "trap 'echo drained; exit 0' TERM; echo up; while :; do sleep 0.05; done"
    command = ["sh", "-c", SERVE, "sh", "sh", "-c", child]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as shell:
        try:
            assert shell.stdout is not None and shell.stdout.readline() == "up\n"
            shell.send_signal(signal.SIGTERM)

            assert shell.communicate(timeout=30)[0] == "drained\n"
            assert shell.returncode == 1
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--kind nomad --servers 1 --trainers 1 train.py", "invalid choice: 'nomad'"),
        ("--kind slurm --servers 1 train.py", "required: --trainers"),
        ("--kind slurm --servers 0 --trainers 1 train.py", "--servers: expected 1 to 65536, got 0"),
        ("--kind slurm --servers 1 --trainers -2 train.py", "--trainers: expected 1 to 65536, got"),
        ("--kind slurm --servers 1 --trainers 1 no.py", "there is no file 'no.py'\n"),
        ("--kind jobset --servers 1 --trainers 1 no.py", "'no.py'; --in-image is for one of the"),
        ("--kind jobset --servers 1 --trainers 1 --in-image train.py", "the script's whole path"),
        ("--kind jobset --servers 1 --trainers 1 --name My_job train.py", "got 'My_job'"),
        ("--kind compose --servers 1 --trainers 1 --name 9a train.py", "with a letter first"),
        (f"--kind jobset --servers 1 --trainers 1 --name {'a' * 60} train.py", "up to 44 small"),
        ("--kind jobset --servers 1 --trainers 1 --memory 4G train.py", "as in 4Gi, got '4G'"),
        ("--kind jobset --servers 1 --trainers 1 --cpus 0.5 train.py", "as in 500m, got '0.5'"),
        ("--kind slurm --servers 1 --trainers 1 --cpus 500m train.py", "Slurm gives whole ones"),
        ("--kind slurm --servers 1 --trainers 1 --image a train.py", "--image: has no effect with"),
        ("--kind jobset --servers 1 --trainers 1 --keys k train.py", "--keys: has no effect with"),
        ("--kind compose --servers 1 --trainers 1 --restarts 2 train.py", "--restarts: has no e"),
        ("--kind jobset --servers 1 --trainers 1 --storage 1Gi train.py", "without --data-dir"),
        (
            "--kind jobset --servers 1 --trainers 1 --data-dir data train.py",
            "expected a whole path",
        ),
        ("--kind compose --servers 1 --trainers 1 --keys k --insecure train.py", "got both"),
        ("--kind slurm --servers 1 --trainers 1 --metrics 65535 train.py", "a port of 1 to 65534"),
        ("--kind slurm --servers 1 --trainers 1 --gpus -1 train.py", "--gpus: expected 0 or more"),
        (
            "--kind slurm --servers 1 --trainers 1 --start-timeout 0 train.py",
            "--start-timeout: exp",
        ),
        (
            "--kind slurm --servers 1 --trainers 1 train.py --password x1y2",
            "--password: expected no",
        ),
        (
            "--kind slurm --servers 1 --trainers 1 train.py --hf-token=x1y2",
            "--hf-token: expected no",
        ),
        ("--kind slurm --servers 1 --trainers 1 train.py s3://me:x1y2@b", "a URL with a password"),
    ],
)
def test_wrong_usage_is_one_sentence(
    capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    """Each mistake is named, nothing is written, and a secret is not repeated."""
    try:
        status: Any = main(["manifest", *line.split()])
    except SystemExit as stopped:
        status = stopped.code
    out, err = capsys.readouterr()

    assert (status, out, err.count("\n")) == (2, "", 1)
    assert message in err and "x1y2" not in err


def test_words_of_a_language_model_are_no_secrets(capsys: pytest.CaptureFixture[str]) -> None:
    """Tokens that are trained on, and their padding."""
    line = "--kind slurm --servers 1 --trainers 1 train.py --tokens 9 --pad-token=0 --key id"

    assert "--pad-token=0 --key id" in written(line, capsys)


def test_a_file_for_compose_names_paths_from_where_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The script and the keys, which Compose looks for beside the file."""
    (tmp_path / "out").mkdir()
    line = "--kind compose --servers 1 --trainers 1 --output out/job.yaml train.py"
    assert written(line, capsys) == ""
    made = yaml.safe_load((tmp_path / "out" / "job.yaml").read_text("utf-8"))

    assert made["services"]["trainer0"]["volumes"] == ["../train.py:/job/train.py:ro"]
    assert made["secrets"]["pserver0"] == {"file": "${KEYS:-../keys}/pserver0"}


def test_the_command_line_knows_every_kind() -> None:
    """It has a list of its own, which needs no import."""
    assert flags.KINDS == description.KINDS
