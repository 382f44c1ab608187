"""The docs agree with the code: generated pages are fresh, commands and names exist, links lead somewhere."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from otel_infer import cli, semconv
from otel_infer.cli import alerts
from otel_infer.config.settings import SETTINGS
from otel_infer.monitoring.alerts import burn_rate_rules, slo_spec
from otel_infer.semconv import prometheus
from tests.stack.processes import Prometheus
from tests.support.grafana_server import GrafanaServer

ROOT = Path(__file__).parent.parent.parent
PAGES = sorted(
    [
        *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("examples/*/README.md"),
    ]
)
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
RENAMED = ROOT / "docs" / "reference" / "renamed-names.md"

SERIES = {
    name
    for metric in semconv.METRICS
    for name in (*prometheus.series_names(metric), prometheus.family_name(metric))
} | {prometheus.label_name(attribute) for metric in semconv.METRICS for attribute in metric.attributes}
"""Prometheus names of all metrics and their labels."""
GRAFANA, PROMETHEUS = "http://localhost:3000", "http://localhost:9090"
"""Addresses in the pages."""
RUN, PARSED = "sh", "bash"
"""Languages of code blocks: tests run the commands of the first on some pages; the second needs a running server."""


def commands(page: Path, *languages: str) -> list[str]:
    """Returns the lines of its shell blocks, without comments."""
    blocks = re.findall(rf"```(?:{'|'.join(languages or (RUN,))})\n(.*?)```", page.read_text(), re.DOTALL)
    lines = [line.split("#")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line]


def test_generated_pages_are_what_the_code_says() -> None:
    script = ROOT / "scripts" / "generate_docs.py"
    ran = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_command_of_ours_in_a_page_is_one_that_we_take(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in commands(page, RUN, PARSED):
        words = shlex.split(line)
        while words and "=" in words[0]:
            words.pop(0)
        if words[:1] == ["make"]:
            assert words[1] in targets, line
        elif "otel-infer" in words and words[0] in ("otel-infer", "kubectl", "docker"):
            cli.build_parser().parse_args(words[len(words) - words[::-1].index("otel-infer") :])


def options(one: argparse.ArgumentParser) -> Iterator[str]:
    """Of a command and of those below it."""
    for action in one._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from options(below)


def test_the_page_of_commands_has_every_option_that_we_take() -> None:
    said = set(re.findall(r"-[\w-]+", (ROOT / "docs" / "reference" / "commands.md").read_text()))
    assert set(options(cli.build_parser())) <= said


def test_the_help_of_alerts_says_all_that_is_promised_without_a_file() -> None:
    for one in slo_spec.DEFAULT_SPEC.objectives:
        length = f"within {one.within:g} s" if one.within > 1 else f"within {one.within * 1000:g} ms"
        assert not one.within or length in str(alerts.__doc__)
    assert {one.share for one in slo_spec.DEFAULT_SPEC.objectives if one.within} == {0.99}


def anchors(page: Path) -> set[str]:
    """Of its headlines, as GitHub makes them."""
    headlines = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", headline.lower()).replace(" ", "-") for headline in headlines}


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_link_in_a_page_leads_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", page.read_text()):
        if "://" not in target:
            to = page.parent / target if target else page
            assert to.exists(), f"{page.name} links to {target}"
            assert not anchor or anchor in anchors(to), f"{page.name} links to {target}#{anchor}"


def known_names() -> set[str]:
    """Returns every name under `infer.*` on the wire."""
    names = {value for value in vars(semconv).values() if isinstance(value, str)}
    return names | {m.name for m in semconv.METRICS} | {*semconv.LATENCY_BY_CAUSE.values()}


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_name_in_a_page_is_one_that_we_use(page: Path) -> None:
    text = page.read_text()
    if page == RENAMED:
        text = re.sub(r"^\| ([^|]*) \| [^|]* \|", r"| \1 |", text, flags=re.MULTILINE)  # old names
    known = known_names()
    for name in re.findall(r"`(infer\.[a-z_.]+)`", text):
        assert name in known, f"{page.name} speaks of {name}"
    for name in re.findall(r"\b(?:gen_ai|infer)_\w+", text):
        assert name in SERIES, f"{page.name} speaks of {name}"
    variables = {setting.variable for setting in SETTINGS.values()}
    for name in re.findall(r"\bOTEL_INFER_[A-Z_]+\b", text):
        assert name in variables, f"{page.name} speaks of {name}"


def test_a_renamed_name_has_a_new_name_that_we_use_and_an_old_one_that_we_do_not() -> None:
    rows = re.findall(r"^\| ([^|]+) \| `([^`]+)` \| `([^`]+)` \|$", RENAMED.read_text(), re.MULTILINE)
    assert len(rows) > 30
    assert [kind for kind, *_ in rows] == sorted(kind for kind, *_ in rows)
    assert len({(kind, old) for kind, old, _ in rows}) == len(rows)
    known = known_names() | SERIES
    for _, old, new in rows:
        if old.startswith(("infer.", "infer_")):
            assert old not in known
            assert new in known, new


def promises() -> str:
    """The example of a `slo.yaml`."""
    (example, *_) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "alerts.md").read_text(), re.DOTALL)
    return str(example)


def test_the_example_of_promises_has_all_that_can_be_said() -> None:
    said = yaml.safe_load(promises())
    assert said.keys() == set(slo_spec.SloSpec._fields)
    assert {key for one in said["objectives"] for key in one} == set(slo_spec.SloObjective._fields)
    assert len(slo_spec.parse_spec(said).objectives) == len(said["objectives"])


def test_every_alert_has_a_headline_where_its_link_leads() -> None:
    alerts = {
        rule["alert"]
        for group in burn_rate_rules.build_rule_groups(slo_spec.DEFAULT_SPEC)["groups"]
        for rule in group["rules"]
        if "alert" in rule
    }
    assert {
        burn_rate_rules.runbook_anchor(alert.removeprefix(burn_rate_rules.ALERT_PREFIX)) for alert in alerts
    } <= anchors(ROOT / "docs" / "alerts.md")


def ours(page: str, *, to_prometheus: bool, **instead: str) -> Iterator[list[str]]:
    """The arguments of our commands in a page, those to a Prometheus or all others."""
    for line in commands(ROOT / page):
        words = shlex.split(line)
        if words[0] == "otel-infer" and ("--prometheus" in words) == to_prometheus:
            yield [instead.get(word, word) for word in words[1:]]


ON_GRAFANA = pytest.mark.parametrize("page", ["docs/alerts.md", "docs/dashboards.md"])


@ON_GRAFANA
def test_grafana_and_files_are_given_what_a_page_says(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("grafana_client", reason="grafana-client is not installed")
    (tmp_path / "slo.yaml").write_text(promises())
    monkeypatch.chdir(tmp_path)
    with GrafanaServer() as grafana:
        monkeypatch.setenv("GRAFANA_TOKEN", grafana.token)
        for arguments in ours(page, to_prometheus=False, **{GRAFANA: grafana.url}):
            assert cli.main(arguments) == 0, arguments
        assert grafana.writes


@ON_GRAFANA
def test_a_prometheus_understands_what_a_page_asks_it(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slo.yaml").write_text(promises())
    monkeypatch.chdir(tmp_path)
    running = Prometheus(tmp_path, {})
    try:
        for arguments in ours(page, to_prometheus=True, **{PROMETHEUS: running.url}):
            assert cli.main(arguments) == 0, arguments
    finally:
        running.stop()


@pytest.mark.real
@pytest.mark.parametrize(
    "page", ["docs/read-a-trace.md", "docs/explain.md", "docs/operate/troubleshooting.md", "docs/report.md"]
)
def test_the_commands_of_a_page_run(page: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    for line in commands(ROOT / page):
        words = [sys.executable, "-m", "otel_infer", *shlex.split(line)[1:]]
        ran = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=110)
        assert ran.returncode == 0, f"{line}\n{ran.stdout[-3000:]}\n{ran.stderr[-3000:]}"
        assert ran.stdout.strip()
