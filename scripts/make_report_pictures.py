"""Takes the pictures of docs/report.md and docs/flight-recorder.md with Chromium.

python scripts/make_report_pictures.py            # of a simulated server that stutters
python scripts/make_report_pictures.py breach     # of a real server that is stopped after a minute
"""

from __future__ import annotations

import hashlib
import random
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
IMAGES = ROOT / "docs" / "images"
sys.path.insert(0, str(ROOT))

from otel_infer import cli
from otel_infer.ringbuffer import events
from otel_infer.sidecar.recording import file
from tests.support.breach import cause_breach
from tests.support.browser import take_screenshot
from tests.support.served_load import ClientRequest, SimulatedServer
from tests.support.tiny import make_model

MS = 1_000_000
WALL = 1_800_000_000_000_000_000
ONLY_REQUESTS = (
    "<style>header,.verdict,footer,section:not(:has(.requests)){display:none}"
    ".requests>tbody>tr:nth-child(n+11){display:none}</style>"
)


def simulate_stutter() -> list[events.RecordedEvent]:
    """Returns the events of short chats with a few long documents between them, and two garbage collections."""
    draw = random.Random(11)
    at, load = 0.0, []
    for _ in range(150):
        at += draw.expovariate(1 / 75)
        load.append(ClientRequest(at, draw.randint(16, 64), draw.randint(24, 90)))
    for document in draw.sample(load, 9):
        document.prompt = draw.randint(1500, 3500)
    server = SimulatedServer(prompt_token=0.06, seed=5, max_batch=24, pauses=[(3300, 130), (8200, 90)])
    return [recorded._replace(event=_add_ids(recorded.event)) for recorded in server.simulate(load)]


def _add_ids(event: object) -> object:
    """Gives an arrival ids, a model and a wall-clock time as servers have them."""
    if not isinstance(event, events.RequestArrived):
        return event
    digest = hashlib.sha256(event.span_id).digest()
    names = {"trace_id": digest[:16], "span_id": digest[16:24], "model": "llama-3-8b"}
    return event._replace(wall_at=WALL + event.at, **names)


def open_third_request(text: str) -> str:
    """Returns the page with its requests only, the third of them open. A fragment would scroll the picture."""
    row = text.split('class="detail" id="')[3].split('"')[0]
    text = text.replace("Content-Security-Policy", "x").replace("location.hash.slice(1)", f"'{row}'")
    text = text.replace("    row.previousElementSibling.scrollIntoView();\n", "")
    return text.replace("</head>", ONLY_REQUESTS + "</head>")


def picture_breach(folder: Path) -> None:
    """Takes the picture of a real server that stood still after a minute of ordinary load."""
    breach = cause_breach(folder, make_model(folder / "model"), 64.0)
    page = folder / "breach.html"
    cli.main(["report", str(breach.tape), "--out", str(page)])
    take_screenshot(page.as_uri(), IMAGES / "breach.png", folder, 1500)


def picture_stutter(folder: Path) -> None:
    """Takes the pictures of a simulated server: the first screen, and one request."""
    recorded, page = simulate_stutter(), folder / "page.html"
    writer = file.RecordingWriter(folder / "stutter.tape")
    writer.write(recorded, recorded[-1].event.at)
    writer.close()
    cli.main(["report", str(folder / "stutter.tape"), "--out", str(page)])
    take_screenshot(page.as_uri(), IMAGES / "report.png", folder, 1200)
    page.write_text(open_third_request(page.read_text()))
    take_screenshot(page.as_uri(), IMAGES / "report-request.png", folder, 1250)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        picture = picture_breach if sys.argv[1:] == ["breach"] else picture_stutter
        picture(Path(name))


if __name__ == "__main__":
    main()
