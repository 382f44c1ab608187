"""Takes the pictures of docs/report.md and docs/flight-recorder.md with Chromium.

The former are of a simulated server that stutters, the latter (a word `breach` says that it is wanted: it takes more than a
minute) of a real one that is stopped for a while.
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
from tests.support.breach import breached
from tests.support.browser import pictured
from tests.support.served_load import Asked, Served
from tests.support.tiny import make_model

MS = 1_000_000
WALL = 1_800_000_000_000_000_000
ONLY_REQUESTS = (
    "<style>header,.verdict,footer,section:not(:has(.requests)){display:none}"
    ".requests>tbody>tr:nth-child(n+11){display:none}</style>"
)


def stutter() -> list[events.RecordedEvent]:
    """Short chats; a few long documents come between them, and two garbage collections."""
    draw = random.Random(11)
    at, asked = 0.0, []
    for _ in range(150):
        at += draw.expovariate(1 / 75)
        asked.append(Asked(at, draw.randint(16, 64), draw.randint(24, 90)))
    for one in draw.sample(asked, 9):
        one.prompt = draw.randint(1500, 3500)
    served = Served(prompt_token=0.06, seed=5, max_batch=24, pauses=[(3300, 130), (8200, 90)])
    return [fact._replace(event=_as_in_life(fact.event)) for fact in served.facts(asked)]


def _as_in_life(fact: object) -> object:
    """With ids and a clock as servers have them."""
    if not isinstance(fact, events.RequestArrived):
        return fact
    digest = hashlib.sha256(fact.span_id).digest()
    named = {"trace_id": digest[:16], "span_id": digest[16:24], "model": "llama-3-8b"}
    return fact._replace(wall_at=WALL + fact.at, **named)


def opened(text: str) -> str:
    """The page with its requests only, the third of them open; a fragment would scroll, which pictures do not survive."""
    row = text.split('class="detail" id="')[3].split('"')[0]
    text = text.replace("Content-Security-Policy", "x").replace("location.hash.slice(1)", f"'{row}'")
    text = text.replace("    row.previousElementSibling.scrollIntoView();\n", "")
    return text.replace("</head>", ONLY_REQUESTS + "</head>")


def breach(folder: Path) -> None:
    """A picture of a real server that stood still, after a minute in which it did not."""
    happened = breached(folder, make_model(folder / "model"), 64.0)
    page = folder / "breach.html"
    cli.main(["report", str(happened.tape), "--out", str(page)])
    pictured(page.as_uri(), IMAGES / "breach.png", folder, 1500)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if sys.argv[1:] == ["breach"]:
            breach(folder)
            return
        said, page = stutter(), folder / "page.html"
        writer = file.RecordingWriter(folder / "stutter.tape")
        writer.write(said, said[-1].event.at)
        writer.close()
        cli.main(["report", str(folder / "stutter.tape"), "--out", str(page)])
        pictured(page.as_uri(), IMAGES / "report.png", folder, 1200)
        page.write_text(opened(page.read_text()))
        pictured(page.as_uri(), IMAGES / "report-request.png", folder, 1250)


if __name__ == "__main__":
    main()
