"""Promises of deploy/prometheus, held by a real Prometheus: each alert fires at its fault, and no
query of the rules or of the dashboard is dead.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from pserver.config import ServerConfig
from pserver.errors import PServerError
from pserver.membership.watermark import WARM_UP
from pserver.security.key_folder import KeyFolder
from pserver.service.server import Server
from pserver.wire_pb2 import SaveRequest
from tests.support import one_parameter
from tests.support.pages import ROOT
from tests.support.prometheus import FOLDER, Prometheus, check, needed, rules
from tests.support.table_trainers import Net, Trainer

pytestmark = [needed, pytest.mark.processes, pytest.mark.timeout(240)]

Fault = Callable[["Scene"], None]


class Scene:
    """A job with metrics, and something that goes wrong in it.

    Args:
        prometheus: reads it.
        stack: ends it.
        folder: for files.
        job: names it.
    """

    def __init__(self, prometheus: Prometheus, stack: ExitStack, folder: Path, job: str) -> None:
        self.prometheus, self.stack, self.folder, self.job = prometheus, stack, folder, job
        self.ports: list[int] = []  # of servers
        self._stopping = threading.Event()
        stack.callback(self._stopping.set)

    def server(self, **settings: Any) -> Server:
        """One with metrics, which Prometheus reads."""
        server = Server(ServerConfig(metrics="0", job=self.job, **settings))
        server.start()
        self.stack.callback(server.stop, 0.0)
        assert server._metrics is not None
        self.ports.append(server._metrics.port)
        secured = server.config.keys is not None
        self.prometheus.read("server", server._metrics.port, secured=secured)
        return server

    def trainer(
        self, server: Server, number: int = 0, trainers: int = 1, **options: Any
    ) -> Trainer:
        """One of a table and a parameter, which Prometheus reads."""
        configs = options.pop("configs", {})
        trainer = Trainer(server.endpoint, number, trainers, Net(**options), **configs)
        self.stack.callback(trainer.job.communicator.leave, "the test is over")
        self.prometheus.read("trainer", trainer.job.communicator.page._exposition.port)
        return trainer

    def again(self, act: Callable[[], None], seconds: float) -> None:
        """Does something again and again, in a thread of its own."""

        def run() -> None:
            while not self._stopping.wait(seconds):
                try:
                    act()
                except PServerError:  # the others have left
                    if not self._stopping.is_set():
                        raise

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        self.stack.callback(thread.join, 3)  # it may wait for another that has ended
        self.stack.callback(self._stopping.set)


def down(scene: Scene) -> None:
    """A server is no more."""
    scene.server().stop(0.0)


def failed(scene: Scene) -> None:
    """A trainer says that it can't go on."""
    trainer = one_parameter.Trainer(scene.server().endpoint)
    trainer.step(1, 1.0)
    trainer.client.leave("out of memory")


def silent(scene: Scene) -> None:
    """A trainer hangs: it sends nothing any more."""
    trainer = one_parameter.Trainer(scene.server().endpoint)
    trainer.client._closing.set()


def stuck(scene: Scene) -> None:
    """A trainer lives, and takes no step."""
    trainer = one_parameter.Trainer(scene.server().endpoint)
    trainer.step(1, 1.0)
    scene.stack.callback(trainer.client.leave)


def straggling(scene: Scene) -> None:
    """One of two sync trainers takes its time."""
    endpoint = scene.server().endpoint
    pair = [one_parameter.Trainer(endpoint, number, 2) for number in range(2)]
    steps = iter(range(1, 10**6))
    late = threading.Barrier(2)

    def first() -> None:
        step = next(steps)
        later.append(step)
        late.wait(30)
        pair[0].step(step, 1.0)

    later: list[int] = []

    def second() -> None:
        late.wait(30)
        threading.Event().wait(0.3)  # it computes
        pair[1].step(later.pop(), 1.0)

    for act in (first, second):
        scene.again(act, 0.0)
    scene.stack.callback(late.abort)


def stale(scene: Scene) -> None:
    """Async trainers take turns: the others' updates lie between two of each."""
    server = scene.server()
    configs = {"send_queue_size": 1}
    trainers = [scene.trainer(server, number, 4, configs=configs) for number in range(4)]

    def turn() -> None:
        for trainer in trainers:
            trainer.add([1], 1.0)

    scene.again(turn, 0.05)


def ruined(scene: Scene) -> None:
    """A trainer sends a NaN."""
    trainer = one_parameter.Trainer(scene.server().endpoint)
    trainer.step(1, float("nan"))
    scene.stack.callback(trainer.client.leave)


def enormous(scene: Scene) -> None:
    """A trainer sends a gradient a million times as large as those before."""
    trainer = scene.trainer(scene.server(), configs={"outlier_push": "apply"})
    for _ in range(WARM_UP):
        trainer.add([1], 1.0, 1.0)
    trainer.add([1], 1e6, 1.0)
    trainer.optimizer.flush()


def full(scene: Scene) -> None:
    """A table is too small for its ids."""
    trainer = scene.trainer(scene.server(), capacity=4)
    ids = iter(range(0, 10**9, 8))

    def push() -> None:
        first = next(ids)
        trainer.add([*range(first, first + 8)], 1.0)

    scene.again(push, 0.05)


def cut(scene: Scene) -> None:
    """A trainer's stream breaks again and again."""
    trainer = scene.trainer(scene.server(transport="tcp"))

    def step() -> None:
        trainer.add([1], 1.0)
        trainer.job.communicator.clients[0].channels[0]._stream.cancel()

    scene.again(step, 0.3)


def expiring(scene: Scene) -> None:
    """A certificate ends in some days."""
    scene.server(keys=str(scene.folder / "keys" / "a"))


FAULTS: dict[str, tuple[Fault, dict[str, str]]] = {
    "PServerDown": (down, {"role": "server"}),
    "PServerJobFailed": (failed, {"process": "server 0"}),
    "PServerTrainerSilent": (silent, {"trainer": "0"}),
    "PServerNoProgress": (stuck, {"process": "server 0"}),
    "PServerStraggler": (straggling, {"peer": "trainer 1"}),
    "PServerStale": (stale, {"lane": "0"}),
    "PServerNonFinite": (ruined, {"trainer": "0"}),
    "PServerOutlierPushes": (enormous, {"trainer": "0"}),
    "PServerEvicting": (full, {"table": "emb"}),
    "PServerLinkBreaks": (cut, {"peer": "server 0"}),
    "PServerCertificateExpires": (expiring, {"process": "server"}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of Prometheus's files, and of keys that end soon."""
    path = tmp_path_factory.mktemp("prometheus")
    KeyFolder.create(path / "keys").add("a", days=5)
    return path


@pytest.fixture(scope="module")
def prometheus(folder: Path) -> Iterator[Prometheus]:
    """One for all tests of this file."""
    prometheus = Prometheus(folder)
    prometheus.start(folder / "keys" / "operator")
    yield prometheus
    prometheus.stop()


@pytest.fixture
def scene(
    prometheus: Prometheus,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Iterator[Scene]:
    """Where something goes wrong, in a job with a name of its own."""
    monkeypatch.setenv("PSERVER_METRICS", "0")
    monkeypatch.setenv("PSERVER_JOB", request.node.name)
    with ExitStack() as stack:
        yield Scene(prometheus, stack, folder, request.node.name)


def test_every_alert_has_a_fault() -> None:
    """And the other way round."""
    assert FAULTS.keys() == {rule["alert"] for rule in rules()}


def test_the_rules_and_the_configuration_are_sound() -> None:
    """promtool says so."""
    assert "SUCCESS" in check("check", "rules", FOLDER / "alerts.yml")
    assert "SUCCESS" in check("check", "config", FOLDER / "prometheus.yml")


@pytest.mark.long
@pytest.mark.parametrize("alert", FAULTS)
def test_an_alert_fires_at_its_fault(scene: Scene, alert: str) -> None:
    """Of the job in which it happens."""
    fault, labels = FAULTS[alert]
    fault(scene)
    whose = {"job": scene.job}
    if alert == "PServerDown":
        whose = {"instance": f"127.0.0.1:{scene.ports[0]}"}

    def fires() -> bool:
        expected = {"alertname": alert, **labels, **whose}.items()
        return any(expected <= each.items() for each in scene.prometheus.firing())

    scene.prometheus.until(fires, f"{alert} fires")


def test_a_healthy_job_is_left_in_peace(scene: Scene) -> None:
    """Nothing fires while two trainers step, longer than the rules look back."""
    server = scene.server()
    pair = [scene.trainer(server, number, 2) for number in range(2)]
    for trainer in pair:
        scene.again(lambda trainer=trainer: trainer.add([1], 1.0, 1.0), 0.02)  # type: ignore[misc]
    name = json.dumps(scene.job)
    scene.prometheus.until(
        lambda: scene.prometheus.query(f"pserver_updates_total{{job={name}}} offset 5s"),
        "it has been read for 5 s",
    )

    assert not [each for each in scene.prometheus.firing() if each.get("job") == scene.job]


def queries() -> list[str]:
    """Of the dashboard."""
    panels = json.loads((FOLDER / "dashboard.json").read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", [])]


def whole_job(scene: Scene) -> None:
    """Jobs in which everything happens that is measured."""
    sync, asynchronous = (scene.server(data_dir=str(scene.folder / name)) for name in ("a", "b"))
    pair = [scene.trainer(sync, number, 2, capacity=4) for number in range(2)]
    alone = scene.trainer(asynchronous, configs={"send_queue_size": 1})
    ids = iter(range(10**9))
    for trainer in pair:
        trainer.job.reported.add(0, {"loss": 0.5})

    def step(trainer: Trainer) -> None:
        trainer.add([next(ids), 1], 1.0, 1.0)
        trainer.job.reported.add(8, {"loss": 0.5})

    for trainer in (*pair, alone):
        scene.again(lambda trainer=trainer: step(trainer), 0.02)  # type: ignore[misc]
    client = alone.job.communicator.clients[0]
    request = SaveRequest(session=client._reply.session, path="x")
    scene.again(lambda: client._control.save(request), 0.1)  # type: ignore[arg-type, return-value]
    ruined(scene)
    enormous(scene)


@pytest.mark.long
def test_no_query_of_the_dashboard_is_dead(scene: Scene) -> None:
    """Each has a result in a job in which everything happens."""
    whole_job(scene)
    for query in queries():
        asked = query.replace("$job", ".*").replace("$run", ".*")
        asked = asked.replace("$__rate_interval", "4s")

        def answers(asked: str = asked) -> bool:
            found = scene.prometheus.query(asked)
            return any(each["value"][1] != "NaN" for each in found)

        scene.prometheus.until(answers, asked)


def test_no_metric_of_the_rules_is_unknown(scene: Scene) -> None:
    """Each is one that Prometheus has read."""
    whole_job(scene)
    words = {word for rule in rules() for word in re.findall(r"\bpserver_\w+", rule["expr"])}
    words.discard("pserver_certificate_expiry_timestamp_seconds")  # of processes with keys

    scene.prometheus.until(lambda: words <= scene.prometheus.names(), f"{sorted(words)}")


def test_the_page_lists_what_there_is(scene: Scene) -> None:
    """Every metric, and none besides; of histograms the name without its ending."""
    page = (ROOT / "docs" / "metrics.md").read_text()
    listed = set(re.findall(r"^\| \[?`(pserver_\w+)", page, re.MULTILINE))
    whole_job(scene)
    expiring(scene)

    def found() -> set[str]:
        names = scene.prometheus.names()
        histograms = {name.removesuffix("_bucket") for name in names if name.endswith("_bucket")}
        return histograms | {
            name
            for name in names
            if name.startswith("pserver_")
            and re.sub("_(bucket|count|sum)$", "", name) not in histograms
        }

    scene.prometheus.until(lambda: found() == listed, f"{sorted(found() ^ listed)}")
