"""Promises of docs/operate.md: an operator finds every alert there."""

from __future__ import annotations

import re

from tests.support.pages import ROOT

ROW = re.compile(r"^\| \[(\w+)\]\(([^)]+)\) \| (yes|no) \|", re.MULTILINE)
ALERT = re.compile(r"- alert: (\w+)\n.*?severity: (\w+).*?runbook: docs/([^\n]+)", re.DOTALL)


def test_every_alert_is_in_the_table_with_its_runbook() -> None:
    """Somebody is paged for the critical ones, and for no other."""
    alerts = (ROOT / "deploy" / "prometheus" / "alerts.yml").read_text(encoding="utf-8")
    page = (ROOT / "docs" / "operate.md").read_text(encoding="utf-8")
    expected = {
        (name, runbook, "yes" if severity == "critical" else "no")
        for name, severity, runbook in ALERT.findall(alerts)
    }

    assert set(ROW.findall(page)) == expected and len(expected) >= 11
