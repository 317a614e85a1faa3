"""``launch --web``: a process that serves a page with the job, for as long as the job runs.

Its address has a token, so it is no process whose output is filed: it is told to whoever has
started the job, and to nobody else.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from pserver.launcher.process import Group
from pserver.onlookers import onlooker

WEB = (sys.executable, "-m", "pserver", "web")
END_SECONDS = 5.0
SAYS = "pserver web at "


class WebPage:
    """The process; a context manager, which ends it.  Whatever becomes of it, the job goes on.

    Args:
        port: of the page; 0 is any free one.
        log_dir: whose logs it shows.
        environment: with the keys of the job's operator.
        group: that dies with ``launch``.
        say: tells the user a sentence.
    """

    def __init__(
        self,
        port: int | None,
        log_dir: str,
        environment: Mapping[str, str],
        group: Group,
        say: Callable[[str], None],
    ) -> None:
        self._port, self._log_dir, self._environment = port, log_dir, environment
        self._group, self._say = group, say
        self._ending = False
        self._process: subprocess.Popen[str] | None = None
        self._reader = threading.Thread(target=self._read, name="web: output", daemon=True)

    @onlooker("the job's page")
    def begin(self, endpoints: Sequence[str]) -> None:
        """The servers are there; without a port there is no page."""
        if self._port is None:
            return
        flags = ["--port", str(self._port), "--log-dir", self._log_dir]
        self._process = subprocess.Popen(
            [*WEB, ",".join(endpoints), *flags],
            env=dict(self._environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            process_group=self._group.id,
        )
        self._reader.start()

    @onlooker("the job's page")
    def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None, "it has begun"
        for line in self._process.stdout:
            if line.startswith(SAYS):
                self._say(f"the job's page is at {line.removeprefix(SAYS).strip()}")
        status = self._process.wait()
        if not self._ending:
            self._say(f"the job's page has ended with status {status}; the job goes on")

    def __enter__(self) -> WebPage:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is None:
            return
        self._ending = True
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        self._process.kill()
        self._reader.join(END_SECONDS)
        if self._process.stdout is not None:
            self._process.stdout.close()
