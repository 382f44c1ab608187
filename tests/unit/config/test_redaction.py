"""Messages and logs show no credential and no control character."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from otel_infer.cli import main
from otel_infer.config import environment
from otel_infer.config.environment import from_env_or_defaults
from otel_infer.config.redaction import list_secrets, mask_secrets, redact_url, replace_controls
from otel_infer.export.otlp.transport import _ExportOutcome
from otel_infer.sidecar import launcher
from otel_infer.sidecar.log_file import configure_logging

SECRET = "canary-5f3a"
ENDPOINT = f"https://user:{SECRET}1@collector:4318/v1/traces?key={SECRET}2&x={SECRET}3"
ENVIRON = {
    "OTEL_EXPORTER_OTLP_ENDPOINT": ENDPOINT,
    "OTEL_EXPORTER_OTLP_HEADERS": f"authorization=Bearer%20{SECRET}4,x-key={SECRET}5",
    "OTEL_INFER_TENANT_HASH_KEY": f"{SECRET}6",
}
LINES = (
    f"POST {ENDPOINT} failed",
    f"Max retries exceeded with url: /v1/traces?key={SECRET}2",
    f"url: '/v1/metrics?other={SECRET}9'",
    f"header authorization: Bearer {SECRET}4 was rejected",
    f"the key {SECRET}6",
    f"redirected to http://{SECRET}7@elsewhere/?{SECRET}8",
)


@pytest.fixture
def configured(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRON.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Path]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers = []
    configure_logging(str(tmp_path / "log"))
    yield tmp_path / "log"
    for handler in root.handlers:
        handler.close()
    root.handlers = handlers
    root.setLevel(level)


@pytest.mark.parametrize("line", LINES)
def test_no_credential_stays_in_a_text(line: str) -> None:
    masked = mask_secrets(line, list_secrets(ENVIRON))
    assert SECRET not in masked
    assert "***" in masked


def test_the_log_of_the_sidecar_holds_no_credential(configured: None, log: Path) -> None:
    for line in LINES:
        logging.getLogger("urllib3.connectionpool").warning("%s", line)
        try:
            raise ConnectionError(line)
        except ConnectionError:
            logging.getLogger("opentelemetry.exporter").exception("export failed")
    text = log.read_text()
    assert "Traceback" in text
    assert text.count("\nConnectionError: ") == len(LINES)
    assert SECRET not in text


def test_the_log_of_the_sidecar_holds_no_terminal_escape(log: Path) -> None:
    record = logging.makeLogRecord({"msg": "model \x1b]0;title\x07\x9b31m\udce9", "levelno": logging.ERROR})
    for handler in logging.getLogger().handlers:  # pytest's own must not get it: it could not pass it on
        if type(handler).__module__ != "_pytest.logging":
            handler.handle(record)
    assert "title" in log.read_text()
    assert not set(log.read_text()) & {"\x1b", "\x07", "\x9b"}
    assert log.stat().st_mode & 0o777 == 0o600


def test_a_rejected_endpoint_is_named_without_its_credentials(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint = f"user:{SECRET}@collector:4318?key={SECRET}"
    for value in (f"grpc://{endpoint}", endpoint):
        _, messages = from_env_or_defaults({"OTEL_EXPORTER_OTLP_ENDPOINT": value})
        assert any("collector:4318" in message for message in messages)
        assert SECRET not in "".join(messages)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", value)
        assert main(["run", "--", "true"]) == 2
        assert SECRET not in capsys.readouterr().err


def test_the_end_of_a_sidecar_is_reported_without_credentials(configured: None, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    for line in LINES:
        launcher.write_end_reason(tmp_path, ValueError(f"{line}\x1b[2J"))
        described = launcher.describe_end(tmp_path)
        assert "ValueError" in described
        assert SECRET not in described
        assert "\x1b" not in described


def test_the_message_of_a_destination_has_no_escape() -> None:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

    response = ExportTraceServiceResponse()
    response.partial_success.rejected_spans = 1
    response.partial_success.error_message = "no\x1b[2J"
    outcome = _ExportOutcome()
    outcome.record_response(response.SerializeToString())
    assert outcome.reason == "partial success: no?[2J"


def test_ordinary_texts_are_unchanged() -> None:
    text = "connection refused at http://collector:4318/v1/traces (is it up?)\n\tyes"
    assert mask_secrets(text, []) == text
    assert replace_controls("naïve – 模型\n") == "naïve – 模型\n"
    assert redact_url("http://collector:4318/v1") == "http://collector:4318/v1"
    assert environment.mask_configured_secrets(os.sep) == os.sep
