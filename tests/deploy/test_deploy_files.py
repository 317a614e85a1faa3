"""Promises of deploy/ that its files hold by themselves: what a container may do, how it is probed
and ended, and where torch comes from.  ``test_containers.py`` builds and runs them.
"""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

import pytest
import yaml

from pserver.cli.flags import parser
from tests.support.pages import ROOT

DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text("utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
SERVERS = [name for name, service in SERVICES.items() if "serve" in service["command"]]
EVERY_SERVICE = pytest.mark.parametrize("name", SERVICES)
USER = "${PSERVER_USER:-"  # who may read the keys; the image's user where nothing is said
GRACE_SECONDS = 10  # a server ends by itself within less: see [Note: draining]


def instructions() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile in order, as (word, rest), with their lines joined."""
    lines = [line for line in DOCKERFILE.splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in joined.split("\n"))]


def of_the_last_stage(word: str) -> list[str]:
    """What the image that remains is told by one kind of instruction."""
    found: list[str] = []
    for each, rest in instructions():
        found = [] if each == "FROM" else found + [rest] * (each == word)
    return found


def probe_of(command: str) -> list[str]:
    """The endpoints that a probe asks; the command line knows its flags."""
    words = shlex.split(command.partition("||")[2] or command)
    words = words[words.index("pserver") + 1 :]
    arguments = parser().parse_args(words)
    assert arguments.command == "status" and arguments.ready
    return str(arguments.endpoints).split(",")


@EVERY_SERVICE
def test_a_service_has_no_privilege(name: str) -> None:
    """It is not root, has no capability and can gain none; it writes to /tmp alone."""
    service = SERVICES[name]

    assert int(service["user"].removeprefix(USER).partition(":")[0]) > 0
    assert service["read_only"] is True
    assert [mount.partition(":")[0] for mount in service["tmpfs"]] == ["/tmp"]
    assert service["cap_drop"] == ["ALL"] and "cap_add" not in service
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not {"privileged", "devices", "ports", "network_mode", "pid", "ipc"} & set(service)


@EVERY_SERVICE
def test_a_service_ends_when_it_is_told_to(name: str) -> None:
    """A signal reaches it, nobody kills it before it has drained, and no process of a job that is
    over is started again.
    """
    service = SERVICES[name]

    assert service["init"] is True and isinstance(service["command"], list)
    assert int(service["stop_grace_period"].removesuffix("s")) > GRACE_SECONDS
    assert service["restart"] == "no"
    assert ("--once" in service["command"]) == (name in SERVERS)


@EVERY_SERVICE
def test_servers_are_probed_and_trainers_are_not(name: str) -> None:
    """A server is asked at the port that it listens on; a trainer has none."""
    service = SERVICES[name]
    if name not in SERVERS:
        assert service["healthcheck"] == {"disable": True}
        return
    bound = service["command"][service["command"].index("--endpoint") + 1]
    (endpoint,) = probe_of(service["healthcheck"]["test"])

    assert endpoint.partition(":")[2] == bound.partition(":")[2]


def test_trainers_name_the_servers() -> None:
    """All of them and nothing else, by the names that they have in the network, which has no way
    out.
    """
    trainers = [SERVICES[name]["environment"] for name in SERVICES if name not in SERVERS]
    numbers = [int(each["TRAINER_ID"]) for each in trainers]

    for each in trainers:
        named = each["PSERVER_ENDPOINTS"].split(",")
        assert [endpoint.partition(":")[0] for endpoint in named] == SERVERS
        assert int(each["TRAINERS"]) == len(trainers)
    assert numbers == list(range(len(trainers)))
    assert COMPOSE["networks"]["default"]["internal"] is True


@EVERY_SERVICE
def test_a_service_has_its_own_keys_and_no_others(name: str) -> None:
    """As a secret, which is not in the image; none does without."""
    service = SERVICES[name]
    (secret,) = service["secrets"]

    assert secret["source"] == name and not {"volumes", "env_file"} & set(service)
    assert service["environment"]["PSERVER_KEYS"] == f"/run/secrets/{secret['target']}"
    assert "PSERVER_INSECURE" not in service["environment"]
    assert COMPOSE["secrets"][name] == {"file": "${KEYS:-./keys}/" + name}
    assert "deploy/keys/" in (ROOT / ".gitignore").read_text("utf-8").splitlines()


def test_the_image_is_that_of_the_demo() -> None:
    """One service builds what all run, with the packages of the examples."""
    (build,) = [service["build"] for service in SERVICES.values() if "build" in service]

    assert build["args"] == {"EXTRAS": "examples"}
    assert (ROOT / "deploy" / build["context"] / build["dockerfile"]).samefile(ROOT / "Dockerfile")
    assert len({service["image"] for service in SERVICES.values()}) == 1


def test_the_image_runs_as_a_user_by_number() -> None:
    """The one of the compose file; an orchestrator that forbids root can tell."""
    (user,) = of_the_last_stage("USER")

    assert {service["user"] for service in SERVICES.values()} == {USER + user + "}"}


def test_the_image_is_probed_without_another_program() -> None:
    """By the command that it has; a trainer, which listens on no port, passes."""
    (check,) = of_the_last_stage("HEALTHCHECK")
    (exposed,) = of_the_last_stage("EXPOSE")
    options, _, command = check.partition("CMD ")

    assert "--timeout=" in options and command.startswith('test "$TRAINING_ROLE" = TRAINER ||')
    assert probe_of(command) == [f"localhost:{exposed}"]


def test_the_image_s_process_gets_signals() -> None:
    """No shell stands between: the command is a list, and there is no entry point."""
    (command,) = of_the_last_stage("CMD")

    assert json.loads(command)[0] == "pserver"
    assert not of_the_last_stage("ENTRYPOINT") and not of_the_last_stage("STOPSIGNAL")


def test_torch_comes_from_its_own_index_alone() -> None:
    """By the name of its build, so that PyPI's wheel with CUDA never takes the place of one that
    cannot be reached.
    """
    installs = [
        rest for word, rest in instructions() if word == "RUN" and "torch" in rest and "pip" in rest
    ]
    defaults = dict(rest.partition("=")[::2] for word, rest in instructions() if word == "ARG")

    (install,) = installs
    assert '--index-url "$TORCH_INDEX_URL" "$wanted"' in install and "--no-deps" in install
    assert "&+$TORCH_BUILD" in install and "exit 1" in install
    assert "--extra-index-url" not in DOCKERFILE
    assert defaults["TORCH_BUILD"] == "cpu"
    assert defaults["TORCH_INDEX_URL"].endswith("/${TORCH_BUILD}")
