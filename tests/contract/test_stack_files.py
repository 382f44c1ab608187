"""The files of the stack and of Kubernetes fit each other and the code: what one names, another has.

Nothing is started here; promtool, amtool and kubectl look at them too, where they are.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from otel_infer import cli, semconv
from otel_infer.assembly.assembler import Assembler
from otel_infer.config.environment import Config, from_env
from otel_infer.config.settings import SETTINGS
from otel_infer.export.sampling import tail_sampler
from otel_infer.monitoring.alerts import burn_rate_rules, cause_alerts
from otel_infer.semconv import prometheus
from tests.stack.tools import tool

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")

ROOT = Path(__file__).parents[2]
STACK = ROOT / "examples" / "stack"
KUBERNETES = ROOT / "examples" / "kubernetes"
COMPOSE = ROOT / "docker-compose.yml"
OVERLAYS = sorted(STACK.glob("compose.*.yml"))
FILES = [
    COMPOSE,
    *sorted(path for folder in (STACK, KUBERNETES) for path in folder.rglob("*.y*ml") if path.is_file()),
]
READMES = [STACK / "README.md", KUBERNETES / "README.md"]
KINDS = ("receivers", "processors", "exporters", "extensions", "connectors")
DEPRECATED = {
    "exporters": {"otlp", "otlphttp", "loadbalancing", "prometheusremotewrite", "logging", "jaeger"},
    "processors": {"batch", "spanmetrics", "resourcedetection", "k8sattributes", "servicegraph"},
    "connectors": {"spanmetrics", "servicegraph"},
    "receivers": {"hostmetrics", "httpcheck", "filelog", "opencensus"},
    "extensions": {"memory_ballast"},
}
"""Names that the collector only takes as aliases, or not any more (contrib 0.162)."""
TEMPO_2 = {"ingester", "ingester_client", "compactor", "metrics_generator_client"}
"""Blocks with which Tempo 3 does not start."""


class _Strict(yaml.SafeLoader):  # type: ignore[misc, name-defined]
    """YAML in which a key stands once."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = [key.value for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        assert len(keys) == len(set(keys)), f"twice the same key, {node.start_mark}"
        return super().construct_mapping(node, deep)


@cache
def _read(path: Path) -> list[Any]:
    return [one for one in yaml.load_all(path.read_text(), Loader=_Strict) if one is not None]


def read(path: Path) -> Any:
    """The one document of a file."""
    (document,) = _read(path)
    return document


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def services(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = read(path)["services"]
    return found


def strings(value: Any) -> Iterator[str]:
    """Every text in a document, keys left out."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            yield from strings(one)
    elif isinstance(value, str):
        yield value


def merged(below: Any, above: Any) -> Any:
    """As the collector lays one configuration over another: maps grow together, the rest is replaced."""
    if isinstance(below, dict) and isinstance(above, dict):
        return {key: merged(below.get(key), above.get(key, below.get(key))) for key in {**below, **above}}
    return above


def mounts(path: Path) -> Iterator[tuple[str, Path, str]]:
    """(service, file or folder here, where it is in the container), of what compose mounts from this repository."""
    for name, service in services(path).items():
        for volume in service.get("volumes", ()):
            source, target, *_ = volume.split(":")
            if source.startswith("."):
                yield name, ROOT / source, target


# ── all of them ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("path", FILES, ids=map(named, FILES))
def test_every_file_is_yaml_in_which_a_key_stands_once(path: Path) -> None:
    assert _read(path)


def _images() -> Iterator[tuple[str, str]]:
    for path in FILES:
        yield from ((named(path), image) for document in _read(path) for image in _images_in(document))
    for line in (STACK / "Dockerfile").read_text().splitlines():
        if line.startswith("FROM "):
            yield "Dockerfile", line.split()[1]


def _images_in(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("image"), str):
            yield value["image"]
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            yield from _images_in(one)


def test_every_image_has_a_tag_with_a_version() -> None:
    found = dict.fromkeys(_images())
    assert len(found) > 6
    for where, image in found:
        tag = image.rpartition("/")[2].partition("@")[0].partition(":")[2]
        assert re.match(r"v?\d+\.\d+", tag), f"{where}: {image}"


def test_one_image_has_one_version_everywhere() -> None:
    versions: dict[str, set[str]] = {}
    for _, image in _images():
        repository, _, tag = image.rpartition(":")
        versions.setdefault(repository, set()).add(tag)
    assert {repository: tags for repository, tags in versions.items() if len(tags) > 1} == {}


def test_every_setting_of_ours_is_one_that_we_have_and_its_value_one_that_we_take() -> None:
    variables = {setting.variable for setting in SETTINGS.values()}
    for path in [*FILES, *READMES]:
        for name in re.findall(r"\bOTEL_INFER_[A-Z_]+\b", path.read_text()):
            assert name in variables, f"{named(path)} speaks of {name}"
    for environ in (services(COMPOSE)["server"]["environment"], settings_of_pods()):
        config = from_env({name: str(value) for name, value in environ.items()})
        assert config != Config()


def test_every_metric_and_label_that_a_query_asks_for_is_one_that_we_send() -> None:
    names = {name for metric in semconv.METRICS for name in prometheus.series_names(metric)}
    labels = {
        prometheus.label_name(attribute) for metric in semconv.METRICS for attribute in metric.attributes
    }
    labels |= {"le", "namespace"}
    queries = [query["query"] for source in _datasources() for query in _trace_queries(source)]
    queries += [trigger["metadata"]["query"] for trigger in _one("ScaledObject")["spec"]["triggers"]]
    assert len(queries) > 4
    for query in queries:
        picked = re.findall(r"([a-z_:]+)\{([^}]*)\}", query.replace("$$__tags", ""))
        assert picked, query
        for name, selectors in picked:
            assert name in names, query
            for label, value in re.findall(r'([a-z_]+)="([^"]*)"', selectors):
                assert label in labels, query
                if label == prometheus.label_name(semconv.REQUEST_STATE):
                    assert value in Assembler().count_active(), query
        for grouped in re.findall(r"\bby \(([^)]*)\)", query):
            assert set(grouped.split(", ")) <= labels, query


@pytest.mark.parametrize("page", READMES, ids=map(named, READMES))
def test_the_commands_and_links_of_the_pages_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#]+)", text):
        assert (page.parent / target).exists(), target
    for line in "\n".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL)).splitlines():
        words = [word for word in shlex.split(line) if "=" not in word or word.startswith("-")]
        for word in words:
            if word.startswith("examples/") or word.endswith(".yml"):
                assert (ROOT / word).exists(), line
        if "otel-infer" in words:
            cli.build_parser().parse_args(words[len(words) - words[::-1].index("otel-infer") :])


# ── compose ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_everything_that_compose_mounts_is_here() -> None:
    for path in (COMPOSE, *OVERLAYS):
        for service, here, there in mounts(path):
            assert here.exists(), f"{service} of {named(path)} mounts {here}"
            assert there.startswith("/")
    declared = set(read(COMPOSE)["volumes"])
    used = {
        volume.partition(":")[0] for one in services(COMPOSE).values() for volume in one.get("volumes", ())
    }
    assert {name for name in used if not name.startswith(".")} == declared


def test_what_a_command_names_is_mounted_for_it() -> None:
    for path in (COMPOSE, *OVERLAYS):
        for name, service in services(path).items():
            there = [target for one, _, target in [*mounts(COMPOSE), *mounts(path)] if one == name]
            for word in service.get("command", ()):
                config = re.match(r"-?-config(?:\.file)?=(.+)", word)
                assert not config or config[1] in there, f"{name} of {named(path)}: {word}"


def test_every_port_is_on_loopback() -> None:
    published = [port for one in services(COMPOSE).values() for port in one.get("ports", ())]
    published += [
        port for path in OVERLAYS for one in services(path).values() for port in one.get("ports", ())
    ]
    assert len(published) > 4
    assert [port for port in published if not str(port).startswith("127.0.0.1:")] == []


def test_every_container_is_read_only_and_without_privileges() -> None:
    for path in (COMPOSE, *OVERLAYS):
        for name, service in services(path).items():
            assert not {"privileged", "cap_add", "network_mode", "pid", "userns_mode"} & set(service)
            if "image" in service:
                assert service["read_only"] is True, name
                assert service["cap_drop"] == ["ALL"], name
                assert service["security_opt"] == ["no-new-privileges:true"], name
                assert not [volume for volume in service.get("volumes", ()) if "docker.sock" in volume]
    for path in (COMPOSE, *OVERLAYS):
        for volume in (volume for one in services(path).values() for volume in one.get("volumes", ())):
            assert not volume.startswith(".") or volume.endswith(":ro"), volume


def test_every_host_that_a_file_names_is_a_service() -> None:
    known = {*services(COMPOSE), *services(STACK / "compose.collectors.yml"), "localhost", "0.0.0.0"}
    for path in FILES:
        if KUBERNETES in path.parents:
            continue
        for text in (text for document in _read(path) for text in strings(document)):
            for host in re.findall(
                r"(?:^|//)([a-z0-9.]+):\d+(?=$|/)", text
            ):  # `host:port`, with or without a scheme
                assert host in known or host == "127.0.0.1", f"{named(path)}: {text}"


def test_the_image_of_the_demo_is_made_of_what_is_here() -> None:
    recipe = (STACK / "Dockerfile").read_text()
    ignored = (STACK / "Dockerfile.dockerignore").read_text().splitlines()
    let_through = {line[1:] for line in ignored if line.startswith("!")}
    copied = [
        source for line in re.findall(r"^COPY (.+) \S+$", recipe, re.MULTILINE) for source in line.split()
    ]
    assert ignored[0] == "*"
    assert set(copied) == let_through
    assert [source for source in copied if not (ROOT / source).exists()] == []
    torch = re.search(r"^TORCH +\?= (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert torch
    assert f"torch=={torch[1]}" in recipe
    server, load = services(COMPOSE)["server"], services(COMPOSE)["load"]
    assert (ROOT / server["build"]["context"] / server["build"]["dockerfile"]).is_file()
    assert "build" not in load, "two at once export the same image, and the second one fails"
    assert load["image"] == server["image"]


def test_the_demo_serves_the_model_that_is_asked_for() -> None:
    load = (STACK / "load.py").read_text()
    (model,) = re.findall(r'^MODEL = "(.+)"$', load, re.MULTILINE)
    assert f'"transformers", "serve", "{model}"' in (STACK / "Dockerfile").read_text()
    assert f"Path('{model}')" in (STACK / "Dockerfile").read_text()
    assert model in _container("server")["command"]


# ── collectors ───────────────────────────────────────────────────────────────────────────────────────────────────


def _collectors() -> dict[str, Any]:
    base = read(STACK / "collector.yaml")
    return {
        "collector": base,
        "tail sampling": merged(base, read(STACK / "collector-tail-sampling.yaml")),
        "front": read(STACK / "collector-front.yaml"),
        "gateway": read(KUBERNETES / "base" / "collector.yaml"),
    }


COLLECTORS = ["collector", "tail sampling", "front", "gateway"]


@pytest.mark.parametrize("which", COLLECTORS)
def test_a_collector_uses_what_it_defines_and_defines_what_it_uses(which: str) -> None:
    config = _collectors()[which]
    pipelines = config["service"]["pipelines"].values()
    connectors = set(config.get("connectors", ()))
    for kind in ("receivers", "processors", "exporters"):
        used = {name for pipeline in pipelines for name in pipeline.get(kind, ())}
        assert used - connectors == set(config.get(kind, ())), kind
    assert set(config.get("extensions", ())) == set(config["service"].get("extensions", ()))
    assert set(config) <= {*KINDS, "service"}


@pytest.mark.parametrize("which", COLLECTORS)
def test_a_collector_has_no_name_that_is_deprecated(which: str) -> None:
    for kind in KINDS:
        types = {name.partition("/")[0] for name in _collectors()[which].get(kind, ())}
        assert types & DEPRECATED[kind] == set()


@pytest.mark.parametrize("which", COLLECTORS)
def test_a_collector_limits_its_memory_before_anything_else(which: str) -> None:
    for pipeline in _collectors()[which]["service"]["pipelines"].values():
        assert pipeline["processors"][0] == "memory_limiter"


def test_tail_sampling_keeps_every_request_that_has_a_reason_of_its_own() -> None:
    sampling = _collectors()["tail sampling"]["processors"]["tail_sampling"]
    policies = {policy["name"]: policy[policy["type"]] for policy in sampling["policies"]}
    kept = policies["kept-for-a-reason"]
    ordinary = {
        semconv.KEEP_REASON_BUDGET,
        semconv.KEEP_REASON_SAMPLED,
        semconv.KEEP_REASON_ALL,
        semconv.KEEP_REASON_NONE,
    }
    assert kept["key"] == semconv.KEEP_REASON
    assert sorted(kept["values"]) == sorted(
        {*semconv.KEEP_REASONS} - ordinary - {semconv.KEEP_REASON_UNSAMPLED}
    )
    assert {*tail_sampler.PRIORITY_REASONS} < {*kept["values"]}
    assert policies["starts-and-checks"]["span"] == [
        f'span.name == "{name}"' for name in (semconv.SPAN_SERVER_START, semconv.SPAN_DOCTOR)
    ]


def test_tail_sampling_waits_longer_than_we_hold_a_request_back() -> None:
    sampling = _collectors()["tail sampling"]["processors"]["tail_sampling"]
    waits = [
        float(sampling[name].removesuffix("s"))
        for name in ("decision_wait_after_root_received", "decision_wait")
    ]
    assert tail_sampler.MAX_HOLD_NS / 1e9 + 5 < waits[0] < waits[1]


def test_the_first_tier_deals_out_traces_by_id_to_the_second_which_samples() -> None:
    front = _collectors()["front"]
    dealt = front["exporters"]["load_balancing"]
    tiers = services(STACK / "compose.collectors.yml")
    assert dealt["routing_key"] == "traceID"
    assert dealt["resolver"]["dns"]["hostname"] in tiers
    assert dealt["retry_on_failure"]["enabled"] and dealt["sending_queue"]["enabled"]
    assert front["service"]["pipelines"]["traces"]["exporters"] == ["load_balancing"]
    assert "load_balancing" not in front["service"]["pipelines"]["metrics"]["exporters"]
    one = services(STACK / "compose.tail-sampling.yml")["collector"]
    assert tiers["sampler"]["command"] == one["command"]


# ── Prometheus, Tempo, Alertmanager ──────────────────────────────────────────────────────────────────────────────


def test_prometheus_takes_what_the_others_send_it() -> None:
    flags = services(COMPOSE)["prometheus"]["command"]
    config = read(STACK / "prometheus.yml")
    assert "--web.enable-otlp-receiver" in flags
    assert "--enable-feature=exemplar-storage" in flags
    assert config["storage"]["exemplars"]["max_exemplars"] > 0
    assert config["otlp"]["translation_strategy"] in (prometheus.__doc__ or "")
    writes = read(STACK / "tempo.yaml")["metrics_generator"]["storage"]["remote_write"]
    assert ("--web.enable-remote-write-receiver" in flags) == bool(writes)
    sent = _collectors()["collector"]["exporters"]["otlp_http/prometheus"]["endpoint"]
    assert sent == "http://prometheus:9090/api/v1/otlp"


def _rules_here() -> Path:
    (pattern,) = read(STACK / "prometheus.yml")["rule_files"]
    folder, _, names = pattern.rpartition("/")
    ((_, here, _),) = [mount for mount in mounts(COMPOSE) if mount[0] == "prometheus" and mount[2] == folder]
    assert names == "*.rules.yml"
    return here


def test_the_rules_that_prometheus_loads_are_where_ours_are() -> None:
    assert _rules_here() == ROOT / "dashboards" / "alerts"
    assert list(_rules_here().glob("*.rules.yml"))


def test_prometheus_knows_where_alertmanager_is() -> None:
    (targets,) = [
        config["targets"]
        for one in read(STACK / "prometheus.yml")["alerting"]["alertmanagers"]
        for config in one["static_configs"]
    ]
    assert targets == ["alertmanager:9093"]


def test_tempo_has_no_block_of_tempo_2_and_takes_what_a_collector_batches() -> None:
    config = read(STACK / "tempo.yaml")
    assert TEMPO_2 & set(config) == set()
    assert "local-blocks" not in config["overrides"]["defaults"]["metrics_generator"]["processors"]
    receiver = config["distributor"]["receivers"]["otlp"]["protocols"]["grpc"]
    sent = _collectors()["collector"]["exporters"]["otlp_grpc/tempo"]["endpoint"]
    assert receiver["endpoint"].rpartition(":")[2] == sent.rpartition(":")[2]
    assert receiver["max_recv_msg_size_mib"] > 4
    written = [config["storage"]["trace"][one]["path"] for one in ("local", "wal")]
    written.append(config["metrics_generator"]["storage"]["path"])
    assert all(path.startswith("/var/tempo/") for path in written)
    assert "tempo:/var/tempo" in services(COMPOSE)["tempo"]["volumes"]


def test_a_page_asks_the_flight_recorder_soon_enough_for_what_it_holds() -> None:
    config = read(STACK / "alertmanager.yml")
    receivers = {receiver["name"]: receiver for receiver in config["receivers"]}
    (paged,) = config["route"]["routes"]
    (hook,) = receivers[paged["receiver"]]["webhook_configs"]
    assert config["route"]["receiver"] in receivers
    assert 'severity = "page"' in paged["matchers"]
    assert (
        hook["url"]
        == f"http://server:{services(COMPOSE)['server']['environment']['OTEL_INFER_DUMP_PORT'].rpartition(':')[2]}/dump"
    )
    assert int(config["route"]["group_wait"].removesuffix("s")) <= 10


def test_a_page_silences_what_may_be_its_cause_and_never_that_telemetry_is_missing() -> None:
    alerts = {burn_rate_rules.ALERT_PREFIX + cause.name for cause in cause_alerts.CAUSE_ALERTS}
    severities = {cause.severity for cause in cause_alerts.CAUSE_ALERTS}
    inhibitions = read(STACK / "alertmanager.yml")["inhibit_rules"]
    for rule in inhibitions:
        assert 'severity = "page"' in rule["source_matchers"]
        matchers = dict(re.match(r'(\w+ \S+) "(.*)"', text).groups() for text in rule["target_matchers"])  # type: ignore[union-attr]
        assert set(matchers["severity =~"].split("|")) == severities - {"page"}
        assert set(matchers["alertname !~"].split("|")) <= alerts
        assert "OtelInferTelemetryDropping" in matchers["alertname !~"]
        assert "job" in rule["equal"]
    model = prometheus.label_name(semconv.REQUEST_MODEL)
    assert [model in rule["equal"] for rule in inhibitions] == [True, False]
    assert f'{model} = ""' in inhibitions[1]["target_matchers"]


# ── Grafana ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _datasources() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = read(STACK / "grafana" / "datasources" / "otel-infer.yaml")["datasources"]
    return found


def _trace_queries(source: dict[str, Any]) -> list[dict[str, str]]:
    found: list[dict[str, str]] = source["jsonData"].get("tracesToMetrics", {}).get("queries", [])
    return found


def test_grafana_reads_what_is_provisioned_here() -> None:
    there = {target: here for service, here, target in mounts(COMPOSE) if service == "grafana"}
    assert there["/etc/grafana/provisioning/datasources"] == STACK / "grafana" / "datasources"
    assert there["/etc/grafana/provisioning/dashboards"] == STACK / "grafana" / "dashboards"
    (provider,) = read(STACK / "grafana" / "dashboards" / "otel-infer.yaml")["providers"]
    dashboards = there[provider["options"]["path"]]
    home = Path(services(COMPOSE)["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert dashboards == ROOT / "dashboards"
    assert str(home.parent) == provider["options"]["path"]
    assert (dashboards / home.name).is_file()


def test_a_dollar_of_grafanas_is_written_twice_where_grafana_reads_its_environment() -> None:
    for path in sorted((STACK / "grafana").rglob("*.yaml")):
        text = "\n".join(line for line in path.read_text().splitlines() if not line.startswith("#"))
        assert [run for run in re.findall(r"\$+", text) if len(run) % 2] == [], named(path)


def test_an_exemplar_leads_to_the_trace_and_every_datasource_that_is_named_is_there() -> None:
    by_type = {source["type"]: source for source in _datasources()}
    ((destination,),) = [[*by_type["prometheus"]["jsonData"]["exemplarTraceIdDestinations"]]]
    assert destination["name"] == "trace_id"
    assert destination["datasourceUid"] == by_type["tempo"]["uid"] == "tempo"
    assert by_type["prometheus"]["uid"] == "prometheus"
    uids = {source["uid"] for source in _datasources()}
    text = (STACK / "grafana" / "datasources" / "otel-infer.yaml").read_text()
    assert set(re.findall(r"datasourceUid: (\S+?)[,\s]", text)) <= uids


def test_a_rate_covers_as_long_as_metrics_take_to_come() -> None:
    (source,) = [source for source in _datasources() if source["type"] == "prometheus"]
    environ = services(COMPOSE)["server"]["environment"]
    interval = from_env({name: str(value) for name, value in environ.items()}).metric_export_interval_ms
    assert source["jsonData"]["timeInterval"] == f"{interval // 1000}s"
    assert read(STACK / "prometheus.yml")["global"]["scrape_interval"] == f"{interval // 1000}s"


def test_everybody_is_a_viewer_in_grafana_and_nobody_can_log_in() -> None:
    environ = services(COMPOSE)["grafana"]["environment"]
    assert environ["GF_AUTH_ANONYMOUS_ENABLED"] == "true"
    assert environ["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    assert environ["GF_AUTH_DISABLE_LOGIN_FORM"] == "true"
    assert environ["GF_AUTH_BASIC_ENABLED"] == "false"
    assert environ["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"
    assert not [name for name in environ if "PASSWORD" in name]


def test_an_anonymous_viewer_may_follow_an_exemplar_into_explore() -> None:
    assert services(COMPOSE)["grafana"]["environment"]["GF_USERS_VIEWERS_CAN_EDIT"] == "true"


# ── Kubernetes ───────────────────────────────────────────────────────────────────────────────────────────────────

MANIFESTS = [path for path in FILES if KUBERNETES in path.parents and path.name != "collector.yaml"]


def _objects() -> list[dict[str, Any]]:
    return [one for path in MANIFESTS for one in _read(path) if one["kind"] != "Kustomization"]


def _one(kind: str, name: str = "") -> dict[str, Any]:
    found = [
        one
        for path in MANIFESTS
        if path.parent.name == "base"
        for one in _read(path)
        if one["kind"] == kind and name in ("", one["metadata"].get("name"))
    ]
    (one,) = found
    return one


def _pod(name: str) -> dict[str, Any]:
    pod: dict[str, Any] = _one("Deployment", name)["spec"]["template"]["spec"]
    return pod


def _container(name: str) -> dict[str, Any]:
    (found,) = [one for one in _pod("llm-server")["containers"] if one["name"] == name]
    container: dict[str, Any] = found
    return container


def _sidecar() -> dict[str, Any]:
    patch: dict[str, Any] = read(KUBERNETES / "sidecar" / "sidecar.yaml")["spec"]["template"]["spec"]
    return patch


def _whole(pod: dict[str, Any]) -> list[dict[str, Any]]:
    """Its containers, but for what a patch changes of one of the base's."""
    both = [*pod.get("containers", ()), *pod.get("initContainers", ())]
    return [container for container in both if "image" in container]


def settings_of_pods() -> dict[str, str]:
    """What the ConfigMap of our settings will say."""
    generated = read(KUBERNETES / "base" / "kustomization.yaml")["configMapGenerator"]
    (ours,) = [one for one in generated if one["name"] == "otel-infer"]
    return dict(text.split("=", 1) for text in ours["literals"])


def test_every_object_has_a_version_a_kind_and_a_name_and_no_two_are_the_same() -> None:
    for path in MANIFESTS:
        for one in _read(path):
            assert one["apiVersion"] and one["kind"], named(path)
    keys = [
        (one["kind"], one["metadata"]["name"])
        for one in _objects()
        if one is not read(KUBERNETES / "sidecar" / "sidecar.yaml")
    ]
    assert len(keys) == len(set(keys)) > 8


def test_kustomize_is_given_every_file_and_none_from_elsewhere() -> None:
    base = read(KUBERNETES / "base" / "kustomization.yaml")
    listed = {
        *base["resources"],
        *(file for one in base["configMapGenerator"] for file in one.get("files", ())),
    }
    assert listed == {path.name for path in (KUBERNETES / "base").glob("*.yaml")} - {"kustomization.yaml"}
    sidecar = read(KUBERNETES / "sidecar" / "kustomization.yaml")
    assert sidecar["resources"] == ["../base"]
    assert [patch["path"] for patch in sidecar["patches"]] == ["sidecar.yaml"]


def test_every_pod_runs_as_restricted_demands() -> None:
    labels = _one("Namespace")["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
    pods = [one["spec"]["template"]["spec"] for one in _objects() if one["kind"] == "Deployment"]
    assert len(pods) == 3
    for pod in pods:
        if pod is not _sidecar():  # a patch: what belongs to the pod is in the base
            assert pod["securityContext"]["runAsNonRoot"] is True
            assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
            assert pod["automountServiceAccountToken"] is False
        for container in _whole(pod):
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert context["readOnlyRootFilesystem"] is True
            assert container["resources"]["limits"]["memory"]
        for volume in pod.get("volumes", ()):
            assert "hostPath" not in volume


def test_where_the_reader_has_a_container_of_its_own_the_server_starts_none() -> None:
    command = _container("server")["command"]
    assert command[:3] == ["otel-infer", "run", "--"]
    (patched,) = _sidecar()["containers"]
    assert (patched["name"], patched["command"]) == ("server", command[3:])


def test_every_volume_that_is_mounted_is_there_and_every_configmap_is_made() -> None:
    made = {one["name"] for one in read(KUBERNETES / "base" / "kustomization.yaml")["configMapGenerator"]}
    for pod, more in ((_pod("gateway"), {}), (_pod("llm-server"), {}), (_sidecar(), _pod("llm-server"))):
        volumes = {volume["name"]: volume for one in (pod, more) for volume in one.get("volumes", ())}
        for container in _whole(pod):
            for mount in container["volumeMounts"]:
                assert mount["name"] in volumes
            for source in container.get("envFrom", ()):
                assert source["configMapRef"]["name"] in made
        for volume in volumes.values():
            assert "configMap" not in volume or volume["configMap"]["name"] in made
    (config,) = _pod("gateway")["containers"][0]["args"]
    assert config == "--config=/etc/otelcol-contrib/collector.yaml"


def test_services_and_monitors_find_the_pods_and_ports_that_there_are() -> None:
    pods = [
        one["spec"]["template"]
        for one in _objects()
        if one["kind"] == "Deployment" and "selector" in one["spec"]
    ]
    for one in _objects():
        if one["kind"] == "Deployment" and "selector" in one["spec"]:
            assert (
                one["spec"]["selector"]["matchLabels"].items()
                <= one["spec"]["template"]["metadata"]["labels"].items()
            )
        if one["kind"] not in ("Service", "PodMonitor"):
            continue
        wanted = one["spec"]["selector"].get("matchLabels") or one["spec"]["selector"]
        (pod,) = [pod for pod in pods if wanted.items() <= pod["metadata"]["labels"].items()]
        ports = {port["name"] for container in pod["spec"]["containers"] for port in container["ports"]}
        asked = one["spec"].get("podMetricsEndpoints") or one["spec"]["ports"]
        assert {port.get("targetPort", port.get("port")) for port in asked} <= ports
    for pod in pods:
        for container in pod["spec"]["containers"]:
            ports = {port["name"] for port in container["ports"]}
            probes = [container[probe]["httpGet"]["port"] for probe in container if probe.endswith("Probe")]
            assert set(probes) <= ports


def test_metrics_are_scraped_where_they_are_served_and_go_no_second_way() -> None:
    ports = {port["name"]: port["containerPort"] for port in _container("server")["ports"]}
    assert settings_of_pods()["OTEL_INFER_METRICS_PORT"] == f"0.0.0.0:{ports['metrics']}"
    injected = {one["name"]: one["value"] for one in _one("Instrumentation")["spec"]["python"]["env"]}
    assert injected["OTEL_METRICS_EXPORTER"] == "none"
    (sidecar,) = _sidecar()["initContainers"]
    assert {one["name"]: one.get("value") for one in sidecar["env"]}["OTEL_METRICS_EXPORTER"] == "none"
    assert set(_collectors()["gateway"]["service"]["pipelines"]) == {"traces"}


def test_the_operator_injects_into_the_server_and_sends_to_the_gateway() -> None:
    annotations = _one("Deployment", "llm-server")["spec"]["template"]["metadata"]["annotations"]
    assert annotations["instrumentation.opentelemetry.io/inject-python"] == "true"
    assert annotations["instrumentation.opentelemetry.io/container-names"] == _container("server")["name"]
    endpoint = _one("Instrumentation")["spec"]["exporter"]["endpoint"]
    ports = {port["port"] for port in _one("Service", "gateway")["spec"]["ports"]}
    host, _, port = endpoint.removeprefix("http://").partition(":")
    assert (host, int(port) in ports) == ("gateway", True)
    (sidecar,) = _sidecar()["initContainers"]
    assert {one["name"]: one.get("value") for one in sidecar["env"]}[
        "OTEL_EXPORTER_OTLP_ENDPOINT"
    ] == endpoint


def test_server_and_sidecar_share_the_rings_in_memory_as_one_user() -> None:
    (sidecar,) = _sidecar()["initContainers"]
    arguments = cli.build_parser().parse_args(sidecar["command"][1:])
    rings = settings_of_pods()["OTEL_INFER_RINGS"]
    assert sidecar["command"][0] == "otel-infer"
    assert arguments.rings == rings
    for container in (sidecar, _container("server")):
        assert {"name": "rings", "mountPath": rings} in container["volumeMounts"]
        assert "runAsUser" not in container["securityContext"]
        assert {"configMapRef": {"name": "otel-infer"}} in container["envFrom"]
    (volume,) = [one for one in _pod("llm-server")["volumes"] if one["name"] == "rings"]
    assert volume["emptyDir"]["medium"] == "Memory"
    user = _pod("llm-server")["securityContext"]["runAsUser"]
    assert sidecar["startupProbe"]["exec"]["command"][-1] == f"{rings}/otel_infer-{user}/sidecar.lock"
    assert sidecar["restartPolicy"] == "Always"  # of an init container: it stays, and ends after the others


def test_the_autoscaler_scales_the_server_on_its_queue() -> None:
    spec = _one("ScaledObject")["spec"]
    assert spec["scaleTargetRef"]["name"] == _one("Deployment", "llm-server")["metadata"]["name"]
    assert "replicas" not in _one("Deployment", "llm-server")["spec"]
    queued = spec["triggers"][0]["metadata"]
    assert 'infer_request_state="queued"' in queued["query"]
    assert all(trigger["metadata"]["ignoreNullValues"] == "false" for trigger in spec["triggers"])
    namespace = _one("Namespace")["metadata"]["name"]
    assert all(f'namespace="{namespace}"' in trigger["metadata"]["query"] for trigger in spec["triggers"])


def test_dashboards_and_rules_become_objects_with_the_same_content(tmp_path: Path) -> None:
    source = {"groups": [{"name": "a", "rules": [{"alert": "A", "expr": "vector(1)\n  > 0"}]}]}
    house = tmp_path / "examples" / "kubernetes"
    alerts = tmp_path / "dashboards" / "alerts"
    for folder in (house, alerts):
        folder.mkdir(parents=True)
    shutil.copy(KUBERNETES / "dashboards_and_rules.py", house)
    (alerts.parent / "overview.json").write_text('{"title": "ümlaut \\" ${x}"}\n')
    (alerts / "causes.rules.yml").write_text("# why\n" + yaml.safe_dump(source))
    board, rule = _printed(
        house / "dashboards_and_rules.py", "--namespace", "seen", "--label", "release=mine"
    )
    assert board["data"] == {"overview.json": (alerts.parent / "overview.json").read_text()}
    assert rule["spec"] == source
    assert rule["metadata"] == {
        "name": "otel-infer-causes",
        "namespace": "seen",
        "labels": {"release": "mine"},
    }


def test_dashboards_and_rules_of_ours_are_small_enough_for_objects() -> None:
    found = _printed(KUBERNETES / "dashboards_and_rules.py")
    kinds = [one["kind"] for one in found]
    assert kinds.count("ConfigMap") == len(list((ROOT / "dashboards").glob("*.json"))) > 0
    assert (
        kinds.count("PrometheusRule") == len(list((ROOT / "dashboards" / "alerts").glob("*.rules.yml"))) > 0
    )
    for one in found:
        assert len(yaml.safe_dump(one)) < 1 << 20
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", one["metadata"]["name"])


def _printed(script: Path, *options: str) -> list[Any]:
    ran = subprocess.run([sys.executable, str(script), *options], capture_output=True, text=True, check=True)
    return list(yaml.load_all(ran.stdout, Loader=_Strict))


# ── with the tools of others ─────────────────────────────────────────────────────────────────────────────────────


def ran(*command: str) -> str:
    """What it said; it has to end well."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_promtool_finds_nothing_wrong_with_prometheus(tmp_path: Path) -> None:
    promtool = tool("promtool")
    version = re.search(r"version (\d+)\.", ran(promtool, "--version"))
    if version is None or int(version[1]) < 3:
        pytest.skip("promtool is older than Prometheus 3, and does not know its configuration")
    config = read(STACK / "prometheus.yml")
    (tmp_path / "prometheus.yml").write_text(
        yaml.safe_dump({**config, "rule_files": [f"{_rules_here()}/*.rules.yml"]})
    )
    assert "SUCCESS" in ran(promtool, "check", "config", str(tmp_path / "prometheus.yml"))


def test_amtool_finds_nothing_wrong_with_alertmanager() -> None:
    amtool = tool("amtool")
    config = str(STACK / "alertmanager.yml")
    assert "SUCCESS" in ran(amtool, "check-config", config)
    for labels, receiver in (
        (("alertname=OtelInferServerGone", "severity=page"), "flight-recorder"),
        (("alertname=OtelInferQueueGrowing", "severity=ticket"), "nobody"),
        (("alertname=OtelInferWatchdog", "severity=none"), "nobody"),
        (("alertname=Somebody", "severity=page"), "nobody"),
    ):
        said = ran(amtool, "config", "routes", "test", f"--config.file={config}", *labels)
        assert said.split() == [receiver], labels


@pytest.mark.parametrize("variant", ["base", "sidecar"])
def test_kustomize_builds_it_and_every_reference_has_what_it_names(variant: str) -> None:
    built = ran(tool("kubectl"), "kustomize", str(KUBERNETES / variant))
    objects = list(yaml.load_all(built, Loader=_Strict))
    made = {one["metadata"]["name"] for one in objects if one["kind"] == "ConfigMap"}
    assert all(
        one["metadata"].get("namespace") == "inference" for one in objects if one["kind"] != "Namespace"
    )
    pods = [one["spec"]["template"]["spec"] for one in objects if one["kind"] == "Deployment"]
    named_by_pods = {
        volume["configMap"]["name"] for pod in pods for volume in pod["volumes"] if "configMap" in volume
    }
    for pod in pods:
        for container in [*pod["containers"], *pod.get("initContainers", ())]:
            named_by_pods |= {source["configMapRef"]["name"] for source in container.get("envFrom", ())}
    assert named_by_pods == made
    assert [len(pod.get("initContainers", ())) for pod in pods] == [0, 1 if variant == "sidecar" else 0]
