"""A container engine: builds the image of this checkout, and runs the compose file of deploy/.

Where a build cannot be without flags of the machine's own (another index, a directory of wheels),
the variable ``BUILD_FLAGS`` has them::

    BUILD_FLAGS="--network host -v /wheels:/torch:ro --build-arg PIP_FIND_LINKS=/torch"

The directory is mounted where the Dockerfile writes nothing; its own wheel goes to /wheels.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

from tests.support.load import run
from tests.support.pages import ROOT

BUILD_SECONDS, RUN_SECONDS = 1500.0, 240.0
LABEL = "com.docker.compose"
NOBODY = 10001  # the image's user


def found() -> tuple[str, list[str]] | None:
    """The engine and the words of its compose command; None where the machine lacks either."""
    for engine in ("docker", "podman"):
        if shutil.which(engine) is None or _fails(engine, "info"):
            continue
        for compose in ([engine, "compose"], [f"{engine}-compose"]):
            if shutil.which(compose[0]) is not None and not _fails(*compose, "version"):
                return engine, compose
    return None


def _fails(*command: str) -> bool:
    done = run(command, capture_output=True, timeout=RUN_SECONDS)
    return done.returncode != 0


class Engine:
    """An engine, and one run of the compose file.

    Args:
        engine, compose: of :func:`found`.
        project: the run's name.
        keys: the folder of its keys.
        file: the compose file.

    Attributes:
        user: who runs the containers, by number: who may read the keys, and is not root.
    """

    def __init__(
        self,
        engine: str,
        compose: list[str],
        project: str,
        keys: Path,
        file: Path = ROOT / "deploy" / "compose.yaml",
    ) -> None:
        self._engine, self._project = engine, project
        self.user = os.getuid() or NOBODY
        self._variables = {"KEYS": str(keys), "PSERVER_USER": f"{self.user}:{self.user}"}
        self._compose = [*compose, "-f", str(file), "-p", project]

    def __call__(self, *words: str, seconds: float = RUN_SECONDS) -> str:
        """What one command of the engine prints; its errors too."""
        return self._run([self._engine, *words], seconds)

    def compose(self, *words: str) -> str:
        """What one command of compose prints."""
        return self._run([*self._compose, *words], RUN_SECONDS)

    def _run(self, command: list[str], seconds: float) -> str:
        done = run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
            cwd=ROOT,
            env={**os.environ, **self._variables},
        )
        assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout[-4000:]}"
        return done.stdout

    def build(self, name: str, *words: str, flags: str | None = None) -> None:
        """Builds the image from this checkout.  ``flags``: in the place of BUILD_FLAGS."""
        given = os.environ.get("BUILD_FLAGS", "") if flags is None else flags
        if self._engine == "podman":
            given += " --format docker"  # the other one has no health checks
        self("build", *shlex.split(given), *words, "-t", name, ".", seconds=BUILD_SECONDS)

    def container(self, service: str) -> str:
        """The container of a service, by its identity."""
        labels = (f"project={self._project}", f"service={service}")
        filters = [word for label in labels for word in ("--filter", f"label={LABEL}.{label}")]
        return self("ps", "--all", "--quiet", *filters).split()[0]

    def inspect(self, what: str) -> dict[str, Any]:
        """What the engine knows of a container or an image."""
        described: dict[str, Any] = json.loads(self("inspect", what))[0]
        return described

    def status(self, service: str) -> int:
        """Waits for the end of a service; its exit status."""
        return int(self("wait", self.container(service)).split()[-1])

    def follow(self, service: str, word: str) -> None:
        """Waits until a service has printed a line with this word."""
        command = ["timeout", str(RUN_SECONDS), self._engine, "logs", "-f", self.container(service)]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as logs:
            assert logs.stdout is not None
            assert any(word in line for line in logs.stdout), f"{service} never says {word!r}"
            logs.kill()
