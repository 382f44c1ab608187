"""llama-cpp-python's own server with a model that has the tokenizer of another one.

python -m benchmarks.whole.programs.llama_server PORT FOLDER     FOLDER: of the model whose tokenizer it has
"""

from __future__ import annotations

import sys
from pathlib import Path

import uvicorn
from llama_cpp.server.app import create_app
from llama_cpp.server.settings import ModelSettings, ServerSettings

from tests.engines.gguf_models import Shape, make_gguf

SHAPE = Shape(layers=1, width=128, inner=256)


def main() -> None:
    """Serves until it is ended. One thread computes."""
    folder = Path(sys.argv[2])
    path = make_gguf(folder / "model.gguf", folder, SHAPE)
    settings = ModelSettings(model=str(path), n_ctx=SHAPE.context, n_threads=1, n_batch=512, verbose=False)
    app = create_app(server_settings=ServerSettings(), model_settings=[settings])

    @app.get("/health")
    def report_health() -> str:
        return "ok"

    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")


if __name__ == "__main__":
    main()
