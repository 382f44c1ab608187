"""What the pages say is what the code does: generated pages are fresh, commands exist, links lead somewhere."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from otel_infer import cli, semconv
from otel_infer.config import SETTINGS

ROOT = Path(__file__).parent.parent.parent
PAGES = sorted(
    [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")]
)
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


def commands(page: Path) -> list[str]:
    """The lines of its shell blocks, without comments."""
    blocks = re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL)
    lines = [line.split("#")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line]


def test_generated_pages_are_what_the_code_says() -> None:
    script = ROOT / "scripts" / "generate_docs.py"
    ran = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_command_of_ours_in_a_page_is_one_that_we_take(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in commands(page):
        words = shlex.split(line)
        while words and "=" in words[0]:
            words.pop(0)
        if words[:1] == ["make"]:
            assert words[1] in targets, line
        elif words[:1] == ["otel-infer"]:
            cli.parser().parse_args(words[1:])


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_link_in_a_page_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_name_in_a_page_is_one_that_we_use(page: Path) -> None:
    text = page.read_text()
    known = {value for value in vars(semconv).values() if isinstance(value, str)} | {
        m.name for m in semconv.METRICS
    }
    for name in re.findall(r"`(infer\.[a-z_.]+)`", text):
        assert name in known, f"{page.name} speaks of {name}"
    variables = {setting.variable for setting in SETTINGS.values()}
    for name in re.findall(r"\bOTEL_INFER_[A-Z_]+\b", text):
        assert name in variables, f"{page.name} speaks of {name}"


@pytest.mark.real
@pytest.mark.parametrize(
    "page", ["docs/read-a-trace.md", "docs/explain.md", "docs/nothing-arrives.md", "docs/report.md"]
)
def test_the_commands_of_a_page_run(page: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    for line in commands(ROOT / page):
        words = [sys.executable, "-m", "otel_infer", *shlex.split(line)[1:]]
        ran = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=110)
        assert ran.returncode == 0, f"{line}\n{ran.stdout[-3000:]}\n{ran.stderr[-3000:]}"
        assert ran.stdout.strip()
