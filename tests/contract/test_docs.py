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
from otel_infer.monitoring.names import ALERT_PREFIX
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
TOOLS_VARIABLE = "OTEL_INFER_TEST_TOOLS"
"""Read by the tests of the stack, not by the package."""
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


def test_generated_pages_match_the_code() -> None:
    script = ROOT / "scripts" / "generate_docs.py"
    ran = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_in_a_page_are_valid(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in commands(page, RUN, PARSED):
        words = shlex.split(line)
        while words and "=" in words[0]:
            words.pop(0)
        if words[:1] == ["make"]:
            assert words[1] in targets, line
        elif "otel-infer" in words and words[0] in ("otel-infer", "kubectl", "docker"):
            cli.build_parser().parse_args(words[len(words) - words[::-1].index("otel-infer") :])


def iter_options(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yields the options of a command and of its subcommands."""
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for subparser in action.choices.values():
                yield from iter_options(subparser)


def test_the_page_of_commands_lists_every_option() -> None:
    listed = set(re.findall(r"-[\w-]+", (ROOT / "docs" / "reference" / "commands.md").read_text()))
    assert set(iter_options(cli.build_parser())) <= listed


def test_the_help_of_alerts_lists_the_default_objectives() -> None:
    objectives = [objective for objective in slo_spec.DEFAULT_SPEC.objectives if objective.within]
    for objective in objectives:
        bound = objective.within
        assert (f"within {bound:g} s" if bound > 1 else f"within {bound * 1000:g} ms") in str(alerts.__doc__)
    assert {objective.share for objective in objectives} == {0.99}


def anchors(page: Path) -> set[str]:
    """Returns the anchors of the headlines of a page, as GitHub makes them."""
    headlines = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", headline.lower()).replace(" ", "-") for headline in headlines}


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_in_a_page_have_a_target(page: Path) -> None:
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
def test_names_in_a_page_exist(page: Path) -> None:
    text = page.read_text()
    if page == RENAMED:
        text = re.sub(r"^\| ([^|]*) \| [^|]* \|", r"| \1 |", text, flags=re.MULTILINE)  # old names
    known = known_names()
    for name in re.findall(r"`(infer\.[a-z_.]+)`", text):
        assert name in known, f"{page.name} names {name}"
    for name in re.findall(r"\b(?:gen_ai|infer)_\w+", text):
        assert name in SERIES, f"{page.name} names {name}"
    variables = {setting.variable for setting in SETTINGS.values()} | {TOOLS_VARIABLE}
    for name in re.findall(r"\bOTEL_INFER_[A-Z_]+\b", text):
        assert name in variables, f"{page.name} names {name}"


def test_renamed_names_are_sorted_and_only_new_ones_exist() -> None:
    rows = re.findall(r"^\| ([^|]+) \| `([^`]+)` \| `([^`]+)` \|$", RENAMED.read_text(), re.MULTILINE)
    assert len(rows) > 30
    assert [kind for kind, *_ in rows] == sorted(kind for kind, *_ in rows)
    assert len({(kind, old) for kind, old, _ in rows}) == len(rows)
    known = known_names() | SERIES
    for _, old, new in rows:
        if old.startswith(("infer.", "infer_")):
            assert old not in known
            assert new in known, new


def example_objectives() -> str:
    """Returns the example of a `slo.yaml`."""
    (example, *_) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "alerts.md").read_text(), re.DOTALL)
    return str(example)


def test_the_example_of_objectives_has_every_key() -> None:
    example = yaml.safe_load(example_objectives())
    assert example.keys() == set(slo_spec.SloSpec._fields)
    assert {key for objective in example["objectives"] for key in objective} == set(
        slo_spec.SloObjective._fields
    )
    assert len(slo_spec.parse_spec(example).objectives) == len(example["objectives"])


def test_every_alert_has_a_runbook() -> None:
    alerts = {
        rule["alert"]
        for group in burn_rate_rules.build_rule_groups(slo_spec.DEFAULT_SPEC)["groups"]
        for rule in group["rules"]
        if "alert" in rule
    }
    assert {burn_rate_rules.runbook_anchor(alert.removeprefix(ALERT_PREFIX)) for alert in alerts} <= anchors(
        ROOT / "docs" / "alerts.md"
    )


def iter_arguments(page: str, *, to_prometheus: bool, **replacements: str) -> Iterator[list[str]]:
    """Yields the arguments of the commands in a page, those with `--prometheus` or the others."""
    for line in commands(ROOT / page):
        words = shlex.split(line)
        if words[0] == "otel-infer" and ("--prometheus" in words) == to_prometheus:
            yield [replacements.get(word, word) for word in words[1:]]


EACH_PAGE = pytest.mark.parametrize("page", ["docs/alerts.md", "docs/dashboards.md"])


@EACH_PAGE
def test_commands_for_grafana_and_files_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("grafana_client", reason="grafana-client is not installed")
    (tmp_path / "slo.yaml").write_text(example_objectives())
    monkeypatch.chdir(tmp_path)
    with GrafanaServer() as grafana:
        monkeypatch.setenv("GRAFANA_TOKEN", grafana.token)
        for arguments in iter_arguments(page, to_prometheus=False, **{GRAFANA: grafana.url}):
            assert cli.main(arguments) == 0, arguments
        assert grafana.writes


@EACH_PAGE
def test_commands_for_prometheus_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slo.yaml").write_text(example_objectives())
    monkeypatch.chdir(tmp_path)
    running = Prometheus(tmp_path, {})
    try:
        for arguments in iter_arguments(page, to_prometheus=True, **{PROMETHEUS: running.url}):
            assert cli.main(arguments) == 1, arguments  # nothing has data there
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
