"""The one `Integration` that the files of this folder fill, and what they share."""

from __future__ import annotations

from otel_infer.integrations._base import Integration

ENGINE = "vllm"

integration = Integration("vllm", "vllm", ("vllm",), is_engine=True)
