"""Draws every dashboard as SVG, from what a live Prometheus has: a preview, not Grafana.

    python scripts/preview_dashboards.py --prometheus http://127.0.0.1:9090 --minutes 10

writes docs/dashboards/NAME.svg, the pictures of docs/dashboards.md. It asks what Grafana would ask, with everything chosen that can
be chosen; nothing of what it draws is Grafana's.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from otel_infer.cli.prometheus_check import PrometheusClient, PrometheusError  # noqa: E402
from otel_infer.monitoring import dashboards  # noqa: E402
from scripts.preview.answers import Span  # noqa: E402
from scripts.preview.page import drawn  # noqa: E402


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prometheus", metavar="URL", required=True, help="where it answers")
    parser.add_argument("--minutes", metavar="N", type=float, default=10, help="how much is shown (10)")
    parser.add_argument("--end", metavar="UNIX", type=float, default=0, help="until when (now)")
    parser.add_argument("--window", metavar="30s", default="", help="over which rates are taken (N / 30)")
    parser.add_argument("--out", metavar="DIR", type=Path, default=ROOT / "docs" / "dashboards")
    return parser.parse_args()


def main() -> int:
    asked = arguments()
    end = asked.end or time.time()
    window = asked.window or f"{max(round(asked.minutes * 2), 15)}s"
    span = Span(end - asked.minutes * 60, end, window)
    asked.out.mkdir(parents=True, exist_ok=True)
    try:
        for name, board in dashboards.build_dashboards().items():
            file = asked.out / Path(name).with_suffix(".svg")
            file.write_text(drawn(board, PrometheusClient(asked.prometheus), span), encoding="utf-8")
            print(f"{file}: {file.stat().st_size / 1e3:.0f} kB")
    except PrometheusError as reason:
        print(f"preview_dashboards: {reason}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
