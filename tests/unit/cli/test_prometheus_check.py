"""Commands name the address if it does not answer like Prometheus."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from otel_infer import cli

ANSWERS = {
    "no data": (200, b'{"status": "success"}'),
    "a list": (200, b"[1]"),
    "no JSON": (200, b"<html>"),
    "refused": (422, b'{"error": "too many series"}'),
    "not found": (404, b"not here"),
}


class _AnsweringHandler(BaseHTTPRequestHandler):
    answer = 200, b""

    def do_GET(self) -> None:
        self.send_response(self.answer[0])
        self.end_headers()
        self.wfile.write(self.answer[1])

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), _AnsweringHandler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
@pytest.mark.parametrize("command", [["dashboards", "check"], ["alerts", "test"]], ids=" ".join)
def test_server_with_an_unexpected_answer_is_named(
    server: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: list[str],
    answer: tuple[int, bytes],
) -> None:
    monkeypatch.setattr(_AnsweringHandler, "answer", answer)
    assert cli.main([*command, "--prometheus", server]) == 2
    assert server in capsys.readouterr().err


@pytest.mark.parametrize("address", ["http://localhost:909O", "localhost:9090", "http://"])
def test_invalid_address_is_named(capsys: pytest.CaptureFixture[str], address: str) -> None:
    assert cli.main(["dashboards", "check", "--prometheus", address]) == 2
    assert address in capsys.readouterr().err
