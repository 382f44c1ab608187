"""The section `whole`: what is lost of a whole server's load, hooks switched in one running server.

    python -m benchmarks --only whole [--servers NAME …]

A server takes 30 minutes at most. Results are kept in build/whole, so an interrupted run goes on; a server is measured
anew when the source code of otel_infer or of this section changed, or when its file is removed.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.verdict import Line
from benchmarks.whole import gil_samples, lines, measurement
from benchmarks.whole.servers import list_servers
from otel_infer.cli.demo.model import make_demo_model

RESULTS = Path("build/whole")
LAYERS, HIDDEN = 1, 128
"""So small that a token is nearly all the host's work, as on a fast GPU."""


def measure(quick: bool, servers: Sequence[str] = ()) -> list[Line]:
    """Measures the servers with these names, or all that this environment can run."""
    known = {served.name: served for served in list_servers()}
    unknown = [name for name in servers if name not in known]
    if unknown:
        raise SystemExit(f"unknown here: {', '.join(unknown)}; known: {', '.join(known)}")
    gil_samples.find_py_spy()
    rows: list[Line] = []
    source = hash_source()
    plan = measurement.QUICK if quick else measurement.FULL
    with tempfile.TemporaryDirectory() as folder:
        model = make_demo_model(Path(folder) / "tiny", layers=LAYERS, hidden=HIDDEN)
        for served in [known[name] for name in servers or known]:
            path = (Path(folder) if quick else RESULTS) / f"{served.name}.json"
            result = measurement.load_result(path, source)
            measurement.measure_server(
                served,
                model,
                result,
                path,
                plan,
                lambda result, served=served: lines.are_rounds_conclusive(served, result),
            )
            rows += lines.make_lines(served, result, quick)
    return rows


def hash_source() -> str:
    """Returns a hash of the code that is measured, and of the code that measures."""
    digest = hashlib.sha256()
    for folder in (Path(gil_samples.PACKAGE), Path(__file__).parent):
        for path in sorted(folder.rglob("*")):
            if path.suffix in (".py", ".so"):
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
