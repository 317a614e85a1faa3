"""``launch --web``: whatever becomes of the page's process, the job goes on."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pserver.launcher import supervisor
from pserver.launcher.processes import Group
from pserver.launcher.supervisor import WebPage
from tests.support.waiting import eventually

pytestmark = pytest.mark.processes
LASTS = (
    "import sys, time; print('pserver web at http://127.0.0.1:1/?token=t', flush=True); "
    "print(sys.argv[1:], flush=True); time.sleep(60)"
)


def test_the_address_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the user alone: the process's output is filed nowhere; it ends with the job."""
    told: list[str] = []
    monkeypatch.setattr(supervisor, "WEB", (sys.executable, "-c", LASTS))
    with Group() as group, WebPage(8090, "logs", os.environ, group, told.append) as page:
        page.begin(["a:1", "b:2"])
        eventually(lambda: told == ["the job's page is at http://127.0.0.1:1/?token=t"])
        assert isinstance(page._process, subprocess.Popen)
        assert page._process.args[3:] == ["a:1,b:2", "--port", "8090", "--log-dir", "logs"]  # type: ignore[index]
    assert page._process.returncode < 0 and len(told) == 1


def test_a_page_that_ends_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said; and without --web there is none."""
    told: list[str] = []
    monkeypatch.setattr(supervisor, "WEB", (sys.executable, "-c", "raise SystemExit(3)"))
    with Group() as group:
        with WebPage(0, "logs", os.environ, group, told.append) as page:
            page.begin(["a:1"])
            eventually(lambda: told == ["the job's page has ended with status 3; the job goes on"])
        with WebPage(None, "logs", os.environ, group, told.append) as page:
            page.begin(["a:1"])
            assert page._process is None
