"""The log of the sidecar: a file of mode 0600, where `OTEL_INFER_LOG` names one."""

from __future__ import annotations

import logging
import os

from otel_infer.config import environment
from otel_infer.config.private_files import open_private_file


class _MaskingFormatter(logging.Formatter):
    """Formats records of otel_infer and of the libraries that export, without credentials and controls."""

    def format(self, record: logging.LogRecord) -> str:
        return environment.mask_configured_secrets(super().format(record))


def configure_logging(path: str) -> None:
    """Directs the log of the sidecar to this file; "" = no log."""
    null_handler = logging.NullHandler()
    try:
        stream = (
            open(open_private_file(path, os.O_WRONLY | os.O_APPEND), "a", encoding="utf-8") if path else None
        )
        handler = logging.StreamHandler(stream) if stream is not None else null_handler
    except OSError:
        handler = null_handler
    handler.setFormatter(_MaskingFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(
        handlers=[handler], level=logging.CRITICAL if handler is null_handler else logging.INFO
    )
