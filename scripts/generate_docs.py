"""Writes the pages of docs/ that follow from the code: settings, commands, spans and metrics, causes, attributes, alerts. Writes the
tables of pages that follow from committed results: whole servers, and the battery of faults.

`--check` only compares. A test runs it with `--check`, so that a page never differs from the code.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from scripts.docs_pages import alerts, attributes, battery, reference, whole_servers  # noqa: E402

DOCS = ROOT / "docs"
MADE = "<!-- made by scripts/generate_docs.py; do not edit -->\n\n"
PAGES = {
    "alerts.md": alerts.build_alerts_page,
    "reference/attributes.md": attributes.build_attributes_page,
    "reference/causes.md": reference.build_causes_page,
    "reference/commands.md": reference.build_commands_page,
    "reference/configuration.md": reference.build_configuration_page,
    "reference/telemetry.md": reference.build_telemetry_page,
}

SECTIONS = {
    ("operate/cost.md", "whole servers"): whole_servers.build_whole_section,
    ("explain.md", "battery"): battery.build_battery_section,
    ("explain.md", "battery advice"): battery.build_advice_section,
}
"""Parts of pages that are otherwise written by hand, between two comments with their name."""
COMPARED_ON = {"reference/commands.md": (3, 11)}
"""The wording of argparse's help differs by Python version, so this page is compared on one of them only."""


def replace_section(page: str, name: str, section: str) -> str:
    """Returns the page with this text between the two comments. Raises ValueError if the page lacks them."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    before, found, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"there is no {begin.strip()} … {end}")
    return f"{before}{begin}{section}{end}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if a page is not what would be written")
    check = parser.parse_args().check
    stale = []
    for name, make in PAGES.items():
        if check and COMPARED_ON.get(name, sys.version_info[:2]) != sys.version_info[:2]:
            continue
        path, text = DOCS / name, MADE + make()
        if check and (not path.exists() or path.read_text() != text):
            stale.append(name)
        elif not check:
            path.write_text(text)
    for (name, section), make in SECTIONS.items():
        path = DOCS / name
        text = replace_section(path.read_text(), section, make())
        if check and path.read_text() != text:
            stale.append(name)
        elif not check:
            path.write_text(text)
    if stale:
        print(f"stale: {', '.join(stale)}; run python scripts/generate_docs.py", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
