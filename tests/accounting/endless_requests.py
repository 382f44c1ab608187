"""A server whose requests never end, as a leak in a handler makes them: `endless_requests.py COUNT`."""

from __future__ import annotations

import contextvars
import sys

import otel_infer


def open_request() -> object:
    request = otel_infer.request("generate")
    request.__enter__()
    return request


otel_infer.instrument()
# Each in a context of its own, as the tasks of a server have.
open_requests = [contextvars.Context().run(open_request) for _ in range(int(sys.argv[1]))]
print(len(open_requests), "requests are open", flush=True)
