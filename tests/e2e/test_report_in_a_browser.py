"""A report as a browser shows it: nothing is asked of any network, and the scripts of the page run while nobody else's do."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from otel_infer.cli import main
from otel_infer.cli.report.command import read_recording
from otel_infer.ringbuffer import events
from tests.support.browser import CHROMIUM, WHY_NONE, dumped
from tests.support.pages import Page
from tests.unit.cli.report.test_report import recorded, stutter

pytestmark = [pytest.mark.real, pytest.mark.skipif(CHROMIUM is None, reason=WHY_NONE)]


@pytest.fixture
def elsewhere() -> Iterator[tuple[str, list[str]]]:
    """A server somewhere else, and what was asked of it."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()
        thread.join()


def report_of(path: Path, folder: Path) -> tuple[Path, str]:
    """The page of a tape, and the fragment that opens its slowest request."""
    out = folder / "out.html"
    assert main(["report", str(path), "--out", str(out)]) == 0
    slowest = max(read_recording(path).records, key=lambda record: record.duration_ns)
    return out, f"r-{slowest.span_id.hex()}"


def test_the_verdict_stands_in_the_page_and_a_strip_is_drawn_for_the_request_that_is_opened(
    tmp_path: Path,
) -> None:
    served, asked = stutter()
    out, key = report_of(recorded(tmp_path / "a.tape", served.facts(asked)), tmp_path)
    dom, urls = dumped(f"{out.as_uri()}#{key}", tmp_path)
    page = Page(dom)
    assert page.text("verdict") == "“starts, then freezes or stutters”: decode is interrupted"
    (row,) = page.all("tr", id=key)
    assert row["class"].split() == ["detail", "opened"]
    assert "move with the arrow keys" in page.text(key) and "▲ step with others' prompts" in page.text(key)
    assert len([r for r in page.all("tr") if "opened" in r.get("class", "")]) == 1
    assert urls == set()


def test_names_that_are_markup_load_nothing_and_run_nothing(
    elsewhere: tuple[str, list[str]], tmp_path: Path
) -> None:
    server, was_asked = elsewhere
    script = "document.title='run';document.body.id='run'"
    name = f'</script><script>{script}</script><img src={server}/i onerror="{script}"><link rel=stylesheet href={server}/c>'
    served, asked = stutter(20)
    said = [
        one._replace(event=one.event._replace(model=name))
        if isinstance(one.event, events.RequestArrived)
        else one
        for one in served.facts(asked)
    ]
    out, key = report_of(recorded(tmp_path / "a.tape", said), tmp_path)
    dom, urls = dumped(f"{out.as_uri()}#{key}", tmp_path)
    page = Page(dom)
    assert (
        not page.all("img") and not page.all("body", id="run") and "otel-infer report" in page.text("title")
    )
    assert page.all("tr", class_="detail opened")
    assert was_asked == [] and urls == set()


@pytest.mark.parametrize("guarded", [True, False], ids=["with its policy", "without, as a control"])
def test_even_markup_that_got_into_a_page_may_load_and_run_nothing(
    elsewhere: tuple[str, list[str]], tmp_path: Path, guarded: bool
) -> None:
    server, was_asked = elsewhere
    served, asked = stutter(20)
    out, _ = report_of(recorded(tmp_path / "a.tape", served.facts(asked)), tmp_path)
    script = f"document.body.id='run';fetch('{server}/f')"
    injected = f'<script>{script}</script><img src="{server}/i" onerror="{script}">'
    text = out.read_text().replace("<main>", "<main>" + injected)
    out.write_text(text if guarded else text.replace("Content-Security-Policy", "x"))
    dom, urls = dumped(out.as_uri(), tmp_path)
    assert ('id="run"' in dom) is not guarded
    assert ("/i" in was_asked) is (f"{server}/i" in urls) is not guarded
    assert bool(was_asked or urls) is not guarded


def test_requests_are_sorted_by_a_column_and_steps_are_read_with_the_arrow_keys(tmp_path: Path) -> None:
    served, asked = stutter(40)
    out, key = report_of(recorded(tmp_path / "a.tape", served.facts(asked)), tmp_path)
    acts = """<script>
        const heads = document.querySelectorAll("table.requests th button");
        [...heads].find((head) => head.textContent === "prompt").click();
        document.querySelector("tr.row a.open").click();
        const strip = document.querySelector("tr.opened .strip svg");
        for (let i = 0; i < 3; i++) strip.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
    </script></body>"""
    text = out.read_text().replace("Content-Security-Policy", "x")
    out.write_text(text.replace("</body>", acts))
    page = Page(dumped(out.as_uri(), tmp_path)[0])
    records = sorted(read_recording(tmp_path / "a.tape").records, key=lambda record: -record.input_tokens)
    details = [row for row in page.all("tr") if "detail" in row.get("class", "").split()]
    assert [row["id"] for row in details][:5] == [f"r-{record.span_id.hex()}" for record in records[:5]]
    assert "opened" in details[0]["class"] and page.all("th", **{"aria-sort": "descending"})
    rows = records[0].steps
    assert rows is not None
    assert f"step {rows.step[3]}, tokens at " in page.text("output")
