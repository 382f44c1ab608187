"""A real Chromium for tests of pages: headless, without network traffic of its own, with a profile for each page."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome", "chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
SKIP_REASON = "no Chromium on this machine (Debian: make browser)"
QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-default-apps",
    "--disable-dev-shm-usage", "--no-proxy-server", "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
)  # fmt: skip


def require_chromium() -> str:
    """Returns the path of Chromium; skips the test where there is none."""
    if CHROMIUM is None:
        pytest.skip(SKIP_REASON)
    return CHROMIUM


def offline_prefix() -> tuple[str, ...]:
    """Returns the prefix that runs a command without any network; empty where that is not permitted."""
    alone = ("unshare", "--net")
    allowed = (
        shutil.which("unshare") and subprocess.run([*alone, "true"], capture_output=True).returncode == 0
    )
    return alone if allowed else ()


def dump_page(url: str, folder: Path, launcher: tuple[str, ...] = ()) -> tuple[str, set[str]]:
    """Returns the page after its scripts ran, and the addresses it requested. The browser's own requests have no origin."""
    log = folder / "net.json"
    command = [
        *launcher,
        require_chromium(),
        *QUIET,
        f"--user-data-dir={folder / 'profile'}",
        f"--log-net-log={log}",
    ]
    ran = subprocess.run([*command, "--dump-dom", url], capture_output=True, timeout=100, check=True)
    parameters = [event["params"] for event in json.loads(log.read_text())["events"] if "params" in event]
    of_page = [event for event in parameters if event.get("initiator", "not an origin") != "not an origin"]
    return ran.stdout.decode(), {one["url"] for one in of_page if one.get("url", "").startswith("http")}


def take_screenshot(url: str, out: Path, folder: Path, height: int) -> None:
    """Writes a picture of the top of a page, 1200 pixels wide."""
    where = (f"--user-data-dir={folder / 'profile'}", f"--window-size=1200,{height}", f"--screenshot={out}")
    subprocess.run([require_chromium(), *QUIET, *where, url], check=True, capture_output=True, timeout=100)
