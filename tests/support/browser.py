"""Chromium without a window, where it and its driver are installed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import util
from typing import Any

import pytest

FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"),
    # it asks no other host for anything
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-quic", "--no-first-run"),
)
MISSING = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
MISSING += [name for name in ("selenium",) if util.find_spec(name) is None]
needed = pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}")


@contextmanager
def browser() -> Iterator[Any]:
    """A browser, which ends with the block."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    for flag in FLAGS:
        options.add_argument(flag)
    options.binary_location = shutil.which("chromium") or ""
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, Service(shutil.which("chromedriver")))
    try:
        yield driver
    finally:
        driver.quit()


def look(driver: Any, width: int, height: int, colours: str) -> None:
    """How large the window is, and which colours its user prefers: "light", "dark"."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-color-scheme", "value": colours}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def violations(driver: Any) -> list[str]:
    """What axe-core finds wrong with the page, a line each.  The page's policy lets no script in
    from elsewhere, so the driver brings it.
    """
    axe = pytest.importorskip("axe_core_python.selenium", reason="needs axe-core-python")
    from pathlib import Path

    script = Path(axe.__file__).parent / "axe.min.js"
    driver.execute_script(script.read_text(encoding="utf-8"))
    found = driver.execute_async_script(
        "const done = arguments[arguments.length - 1];"
        "axe.run(document, {resultTypes: ['violations']}).then(done, done);"
    )
    return [
        f"{each['id']}: {each['help']}: {node['html'][:200]}"
        for each in found["violations"]
        for node in each["nodes"]
    ]
