"""Debian's Prometheus, reading metrics of jobs in this process."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from pserver.launcher.cluster import free_port
from tests.support.load import Deadline
from tests.support.sources import ROOT

PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
needed = pytest.mark.skipif(
    PROMETHEUS is None or PROMTOOL is None, reason="needs Debian's package prometheus"
)
FOLDER = ROOT / "deploy" / "prometheus"
INTERVAL = "200ms"
# the rules wait for minutes and for many steps; a test does not
SHORTER = {"[5m]": "[4s]", "offset 5m": "offset 4s", "> 5\n": "> 1\n", "> 16": "> 2"}
SECONDS = 40.0  # for an alert to fire


def rules() -> list[dict[str, Any]]:
    """The alerts of deploy/prometheus/alerts.yml."""
    (group,) = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


class Prometheus:
    """One that reads what :meth:`read` names, with the rules of deploy/prometheus.

    Args:
        folder: for its files; its configuration is deploy/prometheus/prometheus.yml, but for times
            and targets.
    """

    def __init__(self, folder: Path) -> None:
        self._targets: list[dict[str, Any]] = []
        self._file = folder / "targets.json"
        self._file.write_text("[]")
        text = (FOLDER / "alerts.yml").read_text()
        for long, short in SHORTER.items():
            assert long in text, long
            text = text.replace(long, short)
        found = yaml.safe_load(text)
        for rule in found["groups"][0]["rules"]:
            rule.pop("for", None)
        (folder / "alerts.yml").write_text(yaml.safe_dump(found))
        config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": INTERVAL, "evaluation_interval": INTERVAL}
        (scrape,) = config["scrape_configs"]
        discovery = {"files": [str(self._file)], "refresh_interval": INTERVAL}
        scrape["file_sd_configs"] = [discovery]
        self._folder, self._config, self._port = folder, config, free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, keys: Path) -> None:
        """Starts it.

        Args:
            keys: the folder of a key with which it reads processes with keys.
        """
        secured = {
            "job_name": "secured",
            "honor_labels": True,
            "scheme": "https",
            "tls_config": {
                "ca_file": str(keys / "authority.pem"),
                "cert_file": str(keys / "operator.pem"),
                "key_file": str(keys / "operator.key"),
            },
            "file_sd_configs": [
                {"files": [str(self._folder / "secured.json")], "refresh_interval": INTERVAL}
            ],
        }
        (self._folder / "secured.json").write_text("[]")
        self._config["scrape_configs"].append(secured)
        path = self._folder / "prometheus.yml"
        path.write_text(yaml.safe_dump(self._config))
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    str(PROMETHEUS),
                    f"--config.file={path}",
                    f"--storage.tsdb.path={self._folder / 'data'}",
                    f"--web.listen-address=127.0.0.1:{self._port}",
                ],
                stdout=log,
                stderr=log,
            )
        self.until(lambda: self._ready(), "it is ready")

    def stop(self) -> None:
        """Ends it."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(20)

    def read(self, role: str, *ports: int, secured: bool = False) -> None:
        """It reads these processes, too."""
        targets = [f"127.0.0.1:{port}" for port in ports]
        found = {"targets": targets, "labels": {"role": role}}
        if not secured:
            self._targets.append(found)
        file = self._folder / "secured.json" if secured else self._file
        new = file.with_suffix(".new")  # it may read at any time
        new.write_text(json.dumps([found] if secured else self._targets))
        new.rename(file)

    def query(self, expression: str) -> list[dict[str, Any]]:
        """What an expression gives now."""
        found: list[dict[str, Any]] = self._ask("query", query=expression)["result"]
        return found

    def names(self) -> set[str]:
        """Every metric that it has."""
        return set(self._ask("label/__name__/values"))

    def firing(self) -> list[Mapping[str, str]]:
        """The labels of alerts that fire."""
        return [
            each["labels"] for each in self._ask("alerts")["alerts"] if each["state"] == "firing"
        ]

    def until(self, holds: Any, what: str) -> None:
        """Waits until it holds."""
        deadline = Deadline(SECONDS)
        while not holds():
            assert not deadline.over, f"not within {deadline.limit:.0f} s: {what}\n{self._said()}"
            time.sleep(0.1)

    def _said(self) -> str:
        return (self._folder / "log").read_text()[-2000:]

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/-/ready", timeout=5) as got:
                return bool(got.status == 200)
        except OSError:
            return False

    def _ask(self, path: str, **parameters: str) -> Any:
        words = urllib.parse.urlencode(parameters)
        url = f"http://127.0.0.1:{self._port}/api/v1/{path}?{words}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from error


def check(*words: str | Path) -> str:
    """What promtool says.

    Raises:
        AssertionError: it finds a mistake.
    """
    command: Sequence[str] = [str(PROMTOOL), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert not done.returncode, done.stdout + done.stderr
    return done.stdout
