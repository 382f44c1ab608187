"""The report in a browser: it needs no network, and only the scripts of the page run."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from otel_infer.cli import main
from otel_infer.cli.report.command import read_recording
from otel_infer.ringbuffer import events
from tests.support.browser import CHROMIUM, SKIP_REASON, dump_page
from tests.support.pages import Page
from tests.unit.cli.report.test_report import recorded, stutter

pytestmark = [pytest.mark.real, pytest.mark.skipif(CHROMIUM is None, reason=SKIP_REASON)]


@pytest.fixture
def other_server() -> Iterator[tuple[str, list[str]]]:
    """A foreign server: its URL and the requested paths."""
    paths: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", paths
        server.shutdown()
        thread.join()


def build_report(path: Path, folder: Path) -> tuple[Path, str]:
    """Writes the page of a tape. Returns its path, and the fragment that opens the slowest request."""
    out = folder / "out.html"
    assert main(["report", str(path), "--out", str(out)]) == 0
    slowest = max(read_recording(path).records, key=lambda record: record.duration_ns)
    return out, f"r-{slowest.span_id.hex()}"


def test_page_shows_verdict_and_strip_of_opened_request(
    tmp_path: Path,
) -> None:
    server, load = stutter()
    out, key = build_report(recorded(tmp_path / "a.tape", server.simulate(load)), tmp_path)
    dom, urls = dump_page(f"{out.as_uri()}#{key}", tmp_path)
    page = Page(dom)
    assert page.text("verdict") == "“starts, then freezes or stutters”: the work of the model is interrupted"
    (row,) = page.all("tr", id=key)
    assert row["class"].split() == ["detail", "opened"]
    assert "move with the arrow keys" in page.text(key) and "▲ step with others' prompts" in page.text(key)
    assert len([r for r in page.all("tr") if "opened" in r.get("class", "")]) == 1
    assert urls == set()


def test_markup_in_names_loads_and_runs_nothing(other_server: tuple[str, list[str]], tmp_path: Path) -> None:
    other_url, requested_paths = other_server
    script = "document.title='run';document.body.id='run'"
    name = f'</script><script>{script}</script><img src={other_url}/i onerror="{script}"><link rel=stylesheet href={other_url}/c>'
    server, load = stutter(20)
    renamed_events = [
        event._replace(event=event.event._replace(model=name))
        if isinstance(event.event, events.RequestArrived)
        else event
        for event in server.simulate(load)
    ]
    out, key = build_report(recorded(tmp_path / "a.tape", renamed_events), tmp_path)
    dom, urls = dump_page(f"{out.as_uri()}#{key}", tmp_path)
    page = Page(dom)
    assert (
        not page.all("img") and not page.all("body", id="run") and "otel-infer report" in page.text("title")
    )
    assert page.all("tr", class_="detail opened")
    assert requested_paths == [] and urls == set()


@pytest.mark.parametrize("guarded", [True, False], ids=["with policy", "without policy"])
def test_policy_blocks_injected_markup(
    other_server: tuple[str, list[str]], tmp_path: Path, guarded: bool
) -> None:
    other_url, requested_paths = other_server
    server, load = stutter(20)
    out, _ = build_report(recorded(tmp_path / "a.tape", server.simulate(load)), tmp_path)
    script = f"document.body.id='run';fetch('{other_url}/f')"
    injected = f'<script>{script}</script><img src="{other_url}/i" onerror="{script}">'
    text = out.read_text().replace("<main>", "<main>" + injected)
    out.write_text(text if guarded else text.replace("Content-Security-Policy", "x"))
    dom, urls = dump_page(out.as_uri(), tmp_path)
    assert ('id="run"' in dom) is not guarded
    assert ("/i" in requested_paths) is (f"{other_url}/i" in urls) is not guarded
    assert bool(requested_paths or urls) is not guarded


def test_columns_sort_requests_and_arrow_keys_select_steps(tmp_path: Path) -> None:
    server, load = stutter(40)
    out, key = build_report(recorded(tmp_path / "a.tape", server.simulate(load)), tmp_path)
    script = """<script>
        const heads = document.querySelectorAll("table.requests th button");
        [...heads].find((head) => head.textContent === "prompt").click();
        document.querySelector("tr.row a.open").click();
        const strip = document.querySelector("tr.opened .strip svg");
        for (let i = 0; i < 3; i++) strip.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
    </script></body>"""
    text = out.read_text().replace("Content-Security-Policy", "x")
    out.write_text(text.replace("</body>", script))
    page = Page(dump_page(out.as_uri(), tmp_path)[0])
    records = sorted(read_recording(tmp_path / "a.tape").records, key=lambda record: -record.input_tokens)
    details = [row for row in page.all("tr") if "detail" in row.get("class", "").split()]
    assert [row["id"] for row in details][:5] == [f"r-{record.span_id.hex()}" for record in records[:5]]
    assert "opened" in details[0]["class"] and page.all("th", **{"aria-sort": "descending"})
    rows = records[0].steps
    assert rows is not None
    assert f"step {rows.step[3]}, tokens at " in page.text("output")
