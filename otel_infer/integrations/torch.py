"""torch models that no engine claims (BERT-like, vision): the outermost `forward` is the stage of a request.
"""

from __future__ import annotations

from otel_infer.integrations._base import Integration

integration = Integration("torch", "torch", ("torch",), is_engine=True)
