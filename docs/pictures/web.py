"""Writes the pictures of docs/web.md: ``python docs/pictures/web.py``, where Chromium, its driver
and selenium are installed.

It launches a job of two servers and two trainers, of which one is slower, opens its page in a
browser without a window, and writes docs/pictures/web-light.png, web-dark.png and web-phone.png.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

PICTURES = Path(__file__).parent
SECONDS = 120.0  # for the page to come up
WATCHED = 45.0  # seconds of the job that a picture shows
SCRIPT = """
import time, torch
import trainer
from torch.nn.functional import mse_loss
from trainer import fleet

fleet.init()
torch.manual_seed(0)
parts = {"rows": trainer.DistributedEmbedding(8), "out": torch.nn.Linear(8, 1)}
model = fleet.distributed_model(torch.nn.ModuleDict(parts))
optimizer = fleet.distributed_optimizer(torch.optim.Adagrad(model.parameters(), lr=0.05))
end = time.time() + 180
while time.time() < end:
    ids = torch.randint(0, 20000, (64,))
    loss = mse_loss(model["out"](model["rows"](ids)), (ids % 7 / 7).float().unsqueeze(1))
    loss.backward()
    time.sleep(0.02 + 0.02 * fleet.worker_index())  # trainer 1 is the slow one
    optimizer.step()
    optimizer.zero_grad()
    fleet.report(samples=64, loss=loss)
fleet.finish()
"""
VIEWS = {  # width, height, colours
    "light": (1040, 1180, "light"),
    "dark": (1040, 1180, "dark"),
    "phone": (360, 1100, "light"),
}


def main() -> None:
    """Writes the three pictures."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train.py").write_text(SCRIPT)
        command = [sys.executable, "-m", "pserver", "launch", "--servers", "2", "--trainers", "2"]
        with (Path(folder) / "said").open("w") as said:
            job = subprocess.Popen(
                [*command, "--web=0", "train.py"], cwd=folder, stdout=said, stderr=said
            )
        browser = _browser()
        try:
            browser.get(_url(Path(folder) / "said"))
            WebDriverWait(browser, SECONDS).until(
                lambda found: "loss" in found.find_element(By.ID, "figures").text
            )
            time.sleep(WATCHED)
            for name, (width, height, colours) in VIEWS.items():
                _take(browser, PICTURES / f"web-{name}.png", width, height, colours)
        finally:
            browser.quit()
            job.terminate()
            job.wait()


def _browser() -> Any:
    options = webdriver.ChromeOptions()
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(flag)
    options.binary_location = shutil.which("chromium") or ""
    return webdriver.Chrome(options, Service(shutil.which("chromedriver")))


def _url(said: Path) -> str:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        if found := re.search(r"http://\S+", said.read_text()):
            return found[0]
        time.sleep(0.2)
    raise SystemExit(f"no page within {SECONDS:g} s: {said.read_text()}")


def _take(browser: Any, path: Path, width: int, height: int, colours: str) -> None:
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-color-scheme", "value": colours}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    time.sleep(2.0)  # two drawings
    path.write_bytes(browser.get_screenshot_as_png())
    print(f"wrote {path}, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
