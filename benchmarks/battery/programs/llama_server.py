"""llama-cpp-python's own server in a service of ours, whose other work has the mistakes. One thread computes.

`interrupt_requests`, which is on by default, would end a stream at the next request.
"""

from __future__ import annotations

import sys

import uvicorn
from llama_cpp.server.app import create_app
from llama_cpp.server.settings import ModelSettings, ServerSettings

from benchmarks.battery.programs import mistakes as made

CONTEXT = 4096


def main() -> None:
    mistakes = made.read_mistakes()
    model = ModelSettings(model=sys.argv[2], n_ctx=CONTEXT, n_threads=1, n_batch=512, verbose=False)
    app = create_app(server_settings=ServerSettings(interrupt_requests=False), model_settings=[model])

    @app.get("/health")
    def check() -> dict[str, str]:
        return {"status": "ok"}

    made.finish_start(mistakes)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")


if __name__ == "__main__":
    main()
