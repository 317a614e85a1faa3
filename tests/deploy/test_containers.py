"""Promises of the image and of the compose file, kept by a container engine: ``make check-image``.

They are left out of the tiers ``fast`` and ``test``, because the image takes minutes to build.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

import pytest

from pserver.__main__ import main
from tests.deploy.test_deploy_files import SERVERS, SERVICES
from tests.support.containers import Engine, found

MOST_BYTES = {"pserver": 1.2e9, "pserver-demo": 1.4e9}
PROJECT = "pserver-check"
CPU_INDEX_FLAGS = "--network host --build-arg TORCH_INDEX_URL=http://127.0.0.1:1/"

pytestmark = [pytest.mark.containers, pytest.mark.processes, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """The machine's engine, and keys for all services."""
    engine = found()
    if engine is None:
        pytest.skip("no container engine with compose on this machine")
    keys = tmp_path_factory.mktemp("keys")
    made = Engine(*engine, PROJECT, keys)
    assert main(["keys", "init", str(keys), "--hosts", ",".join(SERVICES)]) == 0
    for path in (keys, *keys.rglob("*")):
        os.chown(path, made.user, -1)
    return made


@pytest.fixture(scope="module")
def built(engine: Engine) -> Engine:
    """Both images are built."""
    engine.build("pserver")
    engine.build("pserver-demo", "--build-arg", "EXTRAS=examples")
    return engine


@pytest.fixture
def up(built: Engine) -> Iterator[Engine]:
    """The demo has been started."""
    built.compose("up", "-d")
    yield built
    built.compose("down")


def test_an_index_that_cannot_be_reached_fails_the_build(engine: Engine) -> None:
    """The message says what was expected from where; PyPI is not asked for torch instead."""
    with pytest.raises(AssertionError) as said:
        engine.build("pserver-without-torch", flags=CPU_INDEX_FLAGS)

    assert re.search(r"expected torch==[\d.]+\+cpu from http://127.0.0.1:1/", str(said.value))
    assert "nvidia" not in str(said.value)


@pytest.mark.parametrize("image", MOST_BYTES)
def test_the_image_is_small(image: str, built: Engine) -> None:
    """With the packages of the examples, and without."""
    assert built.inspect(image)["Size"] <= MOST_BYTES[image]


def test_an_image_without_extras_has_no_cuda_and_no_examples_packages(built: Engine) -> None:
    """Torch is the CPU's."""
    code = (
        "import importlib.util as u, torch; print('it has', torch.__version__, torch.version.cuda, "
        "*(name for name in ('sklearn', 'pyarrow', 'nvidia') if u.find_spec(name)))"
    )

    said = built("run", "--rm", "pserver", "python", "-c", code)
    assert re.search(r"^it has [\d.]+\+cpu None$", said, re.MULTILINE), said


def test_the_demo_ends_by_itself(up: Engine) -> None:
    """All four exit with 0, and trainer 0 prints the accuracy, on standard output."""
    assert {name: up.status(name) for name in SERVICES} == dict.fromkeys(SERVICES, 0)
    accuracy = re.search(r"accuracy (0\.\d+)", up("logs", up.container("trainer0")))

    assert accuracy is not None and float(accuracy[1]) > 0.9


def test_processes_have_no_privilege(up: Engine) -> None:
    """As the kernel sees it: no capability, none to gain, no root, and nothing to write to but
    /tmp.
    """
    up.follow("pserver0", "pserver ready at")
    said = up(
        "exec",
        up.container("pserver0"),
        *("sh", "-c", "cat /proc/1/status; touch /tmp/a; touch ~/a || touch /srv/pserver/a || :"),
    )

    assert re.search(r"^NoNewPrivs:\s+1$", said, re.MULTILINE), said
    for which in ("Inh", "Prm", "Eff", "Bnd", "Amb"):
        assert re.search(rf"^Cap{which}:\s+0+$", said, re.MULTILINE), said
    assert re.search(rf"^Uid:(\s+{up.user}){{4}}$", said, re.MULTILINE), said
    assert said.count("Read-only file system") == 2 and "/tmp/a" not in said


def test_a_server_s_probe_answers(up: Engine) -> None:
    """The one of the compose file, in the container."""
    up.follow("pserver0", "pserver ready at")
    probe = SERVICES["pserver0"]["healthcheck"]["test"]

    assert ": ready" in up("exec", up.container("pserver0"), "sh", "-c", probe)


def test_a_job_that_is_stopped_drains(up: Engine) -> None:
    """Nobody has to be killed: the engine's signal ends trainers and servers, which say so; a
    server that a trainer has told of it first has ended with its job.
    """
    up.follow("trainer0", "epoch")
    up.compose("stop", "-t", "60")  # an exit of an interpreter takes long beside other work
    statuses = {name: up.status(name) for name in SERVICES}

    assert 137 not in statuses.values() and 0 not in statuses.values(), statuses
    for name in SERVERS:
        assert re.search("SIGTERM: draining|ended by SIGTERM", up("logs", up.container(name)))
