"""Read by each Python that a test run with ``--patient-waits`` starts: see ../patience.py."""

from contextlib import suppress

with suppress(ImportError):
    from pserver.membership import waits

    waits.WAKE_SECONDS = 3600.0
