"""``pserver serve`` of a cluster with a planned fault: the first one to start is the victim, if a
server is.
"""

from __future__ import annotations

import runpy
import sys
import threading
import time

import fault_marks


def _watch() -> None:
    while not fault_marks.asked():
        time.sleep(0.005)
    fault_marks.strike()


if __name__ == "__main__":
    if fault_marks.VICTIM == "server" and fault_marks.is_first():
        if fault_marks.PHASE == "starting":
            fault_marks.strike()
        else:
            threading.Thread(target=_watch, daemon=True).start()
    sys.argv = ["pserver", "serve", *sys.argv[1:]]
    runpy.run_module("pserver", run_name="__main__")
