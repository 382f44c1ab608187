"""Draws every dashboard as SVG, from the data of a live Prometheus: a preview, not Grafana.

    python scripts/preview_dashboards.py --prometheus http://127.0.0.1:9090 --minutes 10

writes docs/dashboards/NAME.svg, the pictures of docs/dashboards.md. It sends Grafana's queries, with the defaults of all
variables. Legends, axes and colours are its own. It needs matplotlib (extra `dev`).
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from io import StringIO
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from otel_infer.cli.prometheus_check import PrometheusClient, PrometheusError  # noqa: E402
from otel_infer.monitoring import dashboards  # noqa: E402
from scripts.preview.page import draw_dashboard  # noqa: E402
from scripts.preview.queries import TimeRange  # noqa: E402

SVG_STYLE = {"svg.fonttype": "none", "svg.hashsalt": "otel_infer"}
"""Text stays text, and the ids are the same in each run."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prometheus", metavar="URL", required=True, help="the Prometheus to query")
    parser.add_argument("--minutes", metavar="N", type=float, default=10, help="the time that is shown (10)")
    parser.add_argument("--end", metavar="UNIX", type=float, default=0, help="the end of that time (now)")
    parser.add_argument("--window", metavar="30s", default="", help="the window of rates (N / 30)")
    parser.add_argument("--out", metavar="DIR", type=Path, default=ROOT / "docs" / "dashboards")
    return parser.parse_args()


def write_svg(figure: Figure, file: Path) -> None:
    """Writes coordinates with two decimals and a path on one line, which makes the file smaller."""
    out = StringIO()
    with mpl.rc_context(SVG_STYLE):
        figure.savefig(out, format="svg", metadata={"Date": None})
    text = re.sub(r"(\d\.\d\d)\d+", r"\1", out.getvalue())
    file.write_text(re.sub(r" ?\n(?=[MLCQz\"])", " ", text), encoding="utf-8")


def main() -> int:
    arguments = parse_arguments()
    end = arguments.end or time.time()
    window = arguments.window or f"{max(round(arguments.minutes * 2), 15)}s"
    time_range = TimeRange(end - arguments.minutes * 60, end, window)
    prometheus = PrometheusClient(arguments.prometheus)
    arguments.out.mkdir(parents=True, exist_ok=True)
    try:
        for name, dashboard in dashboards.build_dashboards().items():
            file = arguments.out / Path(name).with_suffix(".svg")
            write_svg(draw_dashboard(dashboard, prometheus, time_range), file)
            print(f"{file}: {file.stat().st_size / 1e3:.0f} kB")
    except PrometheusError as error:
        print(f"preview_dashboards: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
