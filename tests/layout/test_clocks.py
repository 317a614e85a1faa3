"""Promises about clocks: what decides something is monotonic, and measures the silence of others by
the time in which this process has run.
"""

from __future__ import annotations

import ast
from pathlib import Path

from tests.support.sources import MODULES, nodes, relative

WALL = {
    *("time.time", "time.time_ns", "time.localtime", "time.gmtime", "time.ctime", "time.strftime"),
    *("datetime.now", "datetime.utcnow", "datetime.today", "date.today"),
}
# what only shows or names a time; or judges a certificate, whose validity is a time of the world
WHY_WALL = {
    "pserver/membership/decisions.py": "stamps records: rows age in days, which checkpoints keep",
    "pserver/membership/lifecycle.py": "stamps what has happened",
    "pserver/job/job.py": "tells a status' own time, beside those of its events",
    "pserver/lane/tables.py": "rows age in days, which checkpoints keep",
    "pserver/lane/recorder.py": "names a recording",
    "pserver/launcher/supervisor.py": "names a folder",
    "pserver/launcher/status.py": "warns of certificates that end soon",
    "pserver/operations/keys.py": "certificates begin and end",
    "pserver/operations/page_actions.py": "names a checkpoint by its time",
    "pserver/ray/actor.py": "certificates begin and end",
    "pserver/security/enrolment.py": "certificates begin and end",
    "pserver/security/key_folder.py": "certificates begin and end",
    "pserver/security/keys.py": "certificates begin and end",
    "pserver/web/server.py": "stamps what a page shows",
    "pserver/control/collector.py": "stamps answers, whose events a page shows by time",
    "trainer/checkpoint/tables.py": "rows age in days, and loaded ones begin to",
    "trainer/embedding/local_rows.py": "rows age in days, which checkpoints keep",
}
# of those who wait for others: which have a reason not to measure by their own running time
SILENCE = ("client", "job_log", "ray", "job", "lane", "membership")


def calls(path: Path) -> set[str]:
    """``module.function`` of what a file calls, or hands on."""
    return {
        f"{node.value.id}.{node.attr}"
        for node in nodes(path)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }


def test_the_wall_clock_shows_and_decides_nothing() -> None:
    """It jumps: where a file reads it, it is known why.  What names an instant that it was given
    reads no clock.
    """
    assert {relative(path) for path in MODULES if calls(path) & WALL} == WHY_WALL.keys()


# functions of the system's monotonic clock for what is no silence of others
WHY_MONOTONIC = {
    "pserver/client/client.py": (
        "when a heartbeat is due: who was away sends one at once; how long it was silent, with "
        "its own pause"
    ),
    "pserver/job/job.py": (
        "answers within a second; how long a server that ends waits for its own disk"
    ),
    "pserver/job/background_saves.py": "how long a server that ends waits for its own disk",
    "pserver/job/meetings.py": "answers within a second",
    "pserver/lane/leases.py": "answers within a second",
    "pserver/membership/lifecycle.py": "the job gives it its clock",
    "pserver/lane/tables.py": "how long steps waited",
    "pserver/membership/decisions.py": "how long steps waited",
    "pserver/job/server_cut.py": "how long steps waited",
    "pserver/lane/tasks.py": "how long an update took",
    "pserver/membership/waits.py": "the end of a call that answers within a second",
}


def test_silence_of_others_is_measured_by_ones_own_running_time() -> None:
    """Files of those that measure it read the system's clock only where it is known why."""
    files = {relative(path): path for path in MODULES}
    names = [
        name for name in files if name.startswith(tuple(f"pserver/{each}/" for each in SILENCE))
    ]

    assert {
        each for each in names if "time.monotonic" in calls(files[each])
    } == WHY_MONOTONIC.keys()
