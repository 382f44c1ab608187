"""KServe's SDK, with its hooks. Its server has no setting for its address, which is any: it is opened for this machine alone."""

from __future__ import annotations

import sys
from typing import Any

import kserve.model_server
from kserve import Model
from kserve.protocol.rest.server import RESTServer

from benchmarks.server_truth.programs.work import classify, finish


class Classes(Model):
    def __init__(self) -> None:
        super().__init__("classes")
        self.ready = True

    def predict(self, payload: Any, headers: Any = None, response_headers: Any = None) -> Any:
        return {"predictions": classify()}

    def postprocess(self, result: Any, headers: Any = None, response_headers: Any = None) -> Any:
        return finish(result)


class LocalRESTServer(RESTServer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.config.host = "127.0.0.1"


if __name__ == "__main__":
    kserve.model_server.RESTServer = LocalRESTServer
    kserve.model_server.ModelServer(http_port=int(sys.argv[1]), enable_grpc=False).start([Classes()])
