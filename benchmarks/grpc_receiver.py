"""An OTLP/gRPC receiver of spans in a process of its own, for tracers that export by gRPC.

python -m benchmarks.grpc_receiver        prints its port; answers each line with the number of spans; ends with its input
"""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any


class GrpcReceiver:
    """Starts the process, and reads its count."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "benchmarks.grpc_receiver"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.endpoint = f"http://127.0.0.1:{self._read()}"

    def __enter__(self) -> GrpcReceiver:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)

    def count_spans(self) -> int:
        """Returns how many spans came until now."""
        print("count", file=self._process.stdin, flush=True)
        return self._read()

    def _read(self) -> int:
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())


def receive_spans() -> None:
    """Receives spans until the standard input ends."""
    import grpc
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

    counted, lock = [0], threading.Lock()

    class Service(trace_service_pb2_grpc.TraceServiceServicer):  # type: ignore[misc]
        def Export(self, request: Any, context: Any) -> Any:  # noqa: N802  the name of the service
            with lock:
                counted[0] += sum(
                    len(of_scope.spans) for one in request.resource_spans for of_scope in one.scope_spans
                )
            return trace_service_pb2.ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(4))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Service(), server)
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    server.start()
    for _ in sys.stdin:
        print(counted[0], flush=True)
    server.stop(None)


if __name__ == "__main__":
    receive_spans()
