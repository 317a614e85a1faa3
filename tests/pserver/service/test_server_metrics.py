"""What the metrics of a running server say."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from pserver.config import ServerConfig
from pserver.launcher.status import ask
from pserver.service.server import Server
from pserver.telemetry.job_view import notices
from pserver.telemetry.metrics import public_name
from pserver.wire_pb2 import SaveRequest
from tests.support import outlier_jobs
from tests.support.one_parameter import NUMBERS, SECONDS, Trainer
from tests.support.scraped import Scraped
from tests.support.table_trainers import Net
from tests.support.table_trainers import Trainer as TableTrainer
from tests.support.waiting import eventually
from trainer import CountFilterEntry


@pytest.fixture
def server() -> Iterator[Server]:
    """With metrics, and a name for its jobs."""
    with Server(ServerConfig(metrics="0", job="clicks")) as server:
        yield server


def scraped(server: Server) -> Scraped:
    """Its page."""
    assert server._metrics is not None
    return Scraped.of(server._metrics.port)


def test_an_empty_server_has_a_page(server: Server) -> None:
    """Its state, its memory, its versions; and it says where, in its readiness line."""
    found = scraped(server)

    assert found.value("pserver_job_state", state="empty") == 1
    assert found.value("pserver_job_state", state="serving") == 0
    assert found.value("process_resident_memory_bytes") > 1e6
    assert found.value("pserver_build_info", torch=torch.__version__) == 1
    assert server._metrics is not None and f", metrics {server._metrics.port})" in str(server)


def test_an_empty_server_has_every_metric(server: Server) -> None:
    """The name and the type of each, so that a dashboard finds them before the first job."""
    found = {each.name: each.type for each in scraped(server).families}
    page = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text(encoding="utf-8")
    servers = page.partition("<!-- metrics of servers")[2].partition("<!-- metrics of")[0]
    rows = re.findall(r"^\| \[?`(pserver_\w+)[^|]*\| (\w+) \|", servers, re.MULTILINE)
    expected = {name.removesuffix("_total"): kind for name, kind in rows}

    assert len(expected) > 30 and expected.items() <= found.items(), (
        expected.items() - found.items()
    )


def test_every_sample_says_whose_it_is(server: Server) -> None:
    """Job, run, incarnation and process are labels of all; no secret is."""
    trainer = Trainer(server.endpoint)
    found = scraped(server)
    expected = {"job": "clicks", "process": "server 0", "run": public_name("first")}

    assert all(expected.items() <= labels.items() for labels in found.labels())
    assert len({labels["incarnation"] for labels in found.labels()}) == 1
    secrets = ("first", trainer.client._reply.session)
    assert not any(secret in labels.values() for labels in found.labels() for secret in secrets)
    trainer.client.leave()


def test_a_job_without_a_name_has_its_fingerprints() -> None:
    """All processes of a job have the same without being told."""
    with Server(ServerConfig(metrics="0")) as server:
        trainer = Trainer(server.endpoint)
        job = server.job.fingerprint[:12]
        assert scraped(server).value("pserver_job_state", state="serving", job=job) == 1
        trainer.client.leave()


def test_steps_are_counted_once(server: Server) -> None:
    """Those applied; one that comes again is repeated."""
    trainer = Trainer(server.endpoint)
    for step in (1, 2, 3):
        trainer.step(step, 1.0)
    trainer.step(3, 1.0)
    found = scraped(server)

    assert found.value("pserver_pushes_total", result="applied") == 3
    assert found.value("pserver_pushes_total", result="repeated") == 1
    assert found.value("pserver_pushes_total", result="refused") == 0
    assert found.value("pserver_updates_total", lane="0") == 3
    for name in ("step", "update"):
        assert found.value(f"pserver_{name}_seconds_count", lane="0") == 3
        assert 0 < found.value(f"pserver_{name}_seconds_sum", lane="0") < SECONDS
    assert found.value("pserver_trainers", state="joined") == 1
    assert found.value("pserver_heartbeat_silence_seconds", trainer="0") < SECONDS
    assert found.value("pserver_held_bytes") == 4000
    received = found.value("pserver_bytes_total", direction="in", transport="shm")
    assert received == server.job.received["shm"] == 5 * 4000  # its value, four gradients
    trainer.client.leave()


def test_a_step_that_is_not_finite_is_counted(server: Server) -> None:
    """By its trainer; one that overflows is refused."""
    trainer = Trainer(server.endpoint)
    trainer.step(1, float("nan"))
    answer = trainer.channel.begin(trainer.destination)
    trainer.channel.commit(2, {0: NUMBERS}, absent=["w"], overflow=True)
    answer.result(timeout=SECONDS)
    found = scraped(server)

    assert found.value("pserver_nonfinite_total", trainer="0") == 1
    assert found.value("pserver_pushes_total", result="refused") == 1
    assert found.value("pserver_pushes_total", result="applied") == 1
    trainer.client.leave()


def test_a_step_far_beyond_its_history_is_counted(server: Server) -> None:
    """By its trainer; ``pserver status`` says how many were refused."""
    trainer = outlier_jobs.trainer(server.endpoint, "async", outlier_push="refuse")
    outlier_jobs.play(trainer, planted=outlier_jobs.PLANTED)
    found = scraped(server)

    assert found.value("pserver_outlier_pushes_total", trainer="0") == 1
    assert found.value("pserver_pushes_total", result="refused") == 1
    assert found.value("pserver_pushes_total", result="applied") == outlier_jobs.STEPS - 1
    said = [each.text for each in notices({server.endpoint: ask(server.endpoint)})]
    assert "1 steps refused because a norm was far beyond its history" in said
    trainer.optimizer.close()


def test_who_holds_up_whom(server: Server) -> None:
    """In a sync round: the first trainer has waited for the second."""
    first, second = (Trainer(server.endpoint, number, 2) for number in range(2))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(first.step, 1, 1.0)
        eventually(lambda: scraped(server).value("pserver_queue_steps", lane="0") == 1)
        second.step(1, 1.0)
        waiting.result(timeout=SECONDS)
    found = scraped(server)
    waits = [
        found.value("pserver_wait_seconds_sum", lane="0", peer=f"trainer {number}")
        for number in range(2)
    ]

    assert waits[0] < 0.001 < waits[1]
    assert found.value("pserver_step_seconds_sum", lane="0") > waits[1]
    assert found.value("pserver_queue_steps", lane="0") == 0
    for each in (first, second):
        each.client.leave()


def test_a_next_job_counts_from_0(server: Server) -> None:
    """It is another run."""
    trainer = Trainer(server.endpoint)
    trainer.step(1, 1.0)
    trainer.client.leave()
    eventually(lambda: scraped(server).value("pserver_job_state", state="empty") == 1)
    assert not any("lane" in labels for labels in scraped(server).labels())
    trainer = Trainer(server.endpoint)

    assert scraped(server).value("pserver_updates_total", lane="0") == 0
    trainer.client.leave()


def test_rows_are_counted_where_they_are(server: Server) -> None:
    """Lookups of rows that are there, and of ids that have none; admissions and what waits."""
    trainer = TableTrainer(
        server.endpoint, 0, 1, Net(entry=CountFilterEntry(2), cache_rows=0), send_queue_size=1
    )
    for ids in ([1, 2], [2, 3], [2]):
        trainer.add(ids, 1.0)
    trainer.optimizer.flush()
    found = scraped(server)

    assert found.value("pserver_table_rows", table="emb", tier="memory") == 1
    assert found.value("pserver_table_rows", table="emb", tier="disk") == 0
    assert found.value("pserver_table_waiting_ids", table="emb") == 2
    assert found.value("pserver_table_admissions_total", table="emb", result="admitted") == 1
    assert found.value("pserver_table_admissions_total", table="emb", result="refused") == 3
    assert found.value("pserver_table_lookups_total", table="emb", tier="new") == 4
    assert found.value("pserver_table_lookups_total", table="emb", tier="memory") == 1
    assert found.value("pserver_table_evictions_total", table="emb", reason="capacity") == 0
    assert found.value("pserver_table_bytes", table="emb") > 0
    trainer.optimizer.close()


def test_staleness_is_what_others_have_done_meanwhile(server: Server) -> None:
    """In an async lane, from one update of a trainer to its next."""
    one, other = (TableTrainer(server.endpoint, n, 2, Net(), send_queue_size=1) for n in range(2))
    for trainer in (one, other, other, other, one):
        trainer.add([1], 1.0)
        trainer.optimizer.flush()
    found = scraped(server)

    assert found.value("pserver_staleness_steps_count", lane="0") == 3
    assert found.value("pserver_staleness_steps_sum", lane="0") == 3
    for trainer in (one, other):
        trainer.optimizer.close()


def test_a_save_is_timed(tmp_path: Any) -> None:
    """So is the pause that it makes."""
    with Server(ServerConfig(metrics="0", data_dir=str(tmp_path))) as server:
        trainer = Trainer(server.endpoint)
        trainer.client._control.save(SaveRequest(session=trainer.client._reply.session, path="x"))
        found = scraped(server)

        assert found.value("pserver_checkpoint_seconds_count") == 1
        paused = found.value("pserver_checkpoint_pause_seconds_sum")
        assert 0 < paused <= found.value("pserver_checkpoint_seconds_sum")
        trainer.client.leave()
