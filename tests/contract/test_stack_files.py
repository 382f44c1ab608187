"""The files of the stack and of Kubernetes are consistent with each other and with the code.

No service is started here. promtool, amtool and kubectl check the files too, where they are installed.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache, reduce
from pathlib import Path
from typing import Any

import pytest

from otel_infer import cli, semconv
from otel_infer.assembly.assembler import Assembler
from otel_infer.config.environment import Config, from_env
from otel_infer.config.settings import SETTINGS
from otel_infer.export.sampling import tail_sampler
from otel_infer.monitoring.alerts import cause_alerts
from otel_infer.monitoring.names import ALERT_PREFIX
from otel_infer.semconv import prometheus
from tests.stack.tools import tool

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")

ROOT = Path(__file__).parents[2]
STACK = ROOT / "examples" / "stack"
GRAFANA = STACK / "grafana"
KUBERNETES = ROOT / "examples" / "kubernetes"
RULES = ROOT / "dashboards" / "alerts"
COMPOSE = ROOT / "docker-compose.yml"
COMPOSE_FILES = [COMPOSE, *sorted(STACK.glob("compose.*.yml"))]
FILES = [
    COMPOSE,
    *sorted(path for folder in (STACK, KUBERNETES) for path in folder.rglob("*.y*ml") if path.is_file()),
]
MANIFESTS = [path for path in FILES if KUBERNETES in path.parents and path.name != "collector.yaml"]
STACK_FILES = [path for path in FILES if KUBERNETES not in path.parents]
READMES = [STACK / "README.md", KUBERNETES / "README.md"]
DEPRECATED = {
    "exporters": {"otlp", "otlphttp", "loadbalancing", "prometheusremotewrite", "logging", "jaeger"},
    "processors": {"batch", "spanmetrics", "resourcedetection", "k8sattributes", "servicegraph"},
    "connectors": {"spanmetrics", "servicegraph"},
    "receivers": {"hostmetrics", "httpcheck", "filelog", "opencensus"},
    "extensions": {"memory_ballast"},
}
"""Component names that the collector accepts only as aliases, or no longer accepts (contrib 0.162)."""
TEMPO_2 = {"ingester", "ingester_client", "compactor", "metrics_generator_client"}
"""Blocks that Tempo 3 refuses at its start."""

# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────


class _StrictLoader(yaml.SafeLoader):  # type: ignore[misc, name-defined]
    """Loads YAML and refuses duplicate keys."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = [key.value for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        assert len(keys) == len(set(keys)), f"duplicate key, {node.start_mark}"
        return super().construct_mapping(node, deep)


@cache
def documents(path: Path) -> list[Any]:
    """Returns the documents of a file, without empty ones."""
    loaded = yaml.load_all(path.read_text(), Loader=_StrictLoader)
    return [document for document in loaded if document is not None]


def read(path: Path) -> Any:
    """Returns the only document of a file."""
    (document,) = documents(path)
    return document


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def each_file(paths: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("path", paths, ids=map(relative, paths))


def iter_strings(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yields every string value of a document after its key."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, (dict, list)):
        for inner, item in value.items() if isinstance(value, dict) else ((key, item) for item in value):
            yield from iter_strings(item, inner)


def merge_configs(base: Any, overlay: Any) -> Any:
    """Merges two configurations as the collector does: maps are united, other values are replaced."""
    if isinstance(base, dict) and isinstance(overlay, dict):
        return {
            key: merge_configs(base.get(key), overlay.get(key, base.get(key))) for key in {**base, **overlay}
        }
    return overlay


COLLECTORS = {
    "collector": [STACK / "collector.yaml"],
    "tail sampling": [STACK / "collector.yaml", STACK / "collector-tail-sampling.yaml"],
    "front": [STACK / "collector-front.yaml"],
    "gateway": [KUBERNETES / "base" / "collector.yaml"],
}
"""The files that each collector merges."""
DOCUMENTS = {
    "compose": COMPOSE,
    "compose, tail sampling": STACK / "compose.tail-sampling.yml",
    "compose, collectors": STACK / "compose.collectors.yml",
    "prometheus": STACK / "prometheus.yml",
    "tempo": STACK / "tempo.yaml",
    "alertmanager": STACK / "alertmanager.yml",
    "datasources": GRAFANA / "datasources" / "otel-infer.yaml",
    "dashboards": GRAFANA / "dashboards" / "otel-infer.yaml",
    "base": KUBERNETES / "base" / "kustomization.yaml",
    "sidecar": KUBERNETES / "sidecar" / "kustomization.yaml",
    "patch": KUBERNETES / "sidecar" / "sidecar.yaml",
}
PARTS = {
    "demo environment": "compose: services server environment",
    "grafana": "compose: services grafana environment",
    "balancer": "front: exporters load_balancing",
    "gateway pod": "Deployment/gateway: spec template spec",
    "server": "Deployment/llm-server: spec template",
    "otel-infer": "patch: spec template spec initContainers otel-infer",
}
"""Short names of parts of documents."""


def find_document(name: str) -> Any:
    """Returns a named document or part of one, a collector's configuration, or a Kubernetes object by `Kind/name`."""
    if name in COLLECTORS:
        return reduce(merge_configs, map(read, COLLECTORS[name]))
    if name in PARTS:
        return find_value(PARTS[name])
    return read(DOCUMENTS[name]) if name in DOCUMENTS else find_object(*name.split("/"))


def find_value(reference: str) -> Any:
    """Returns the value at `document: key key …`. In a list, a key is a position or the name of an element."""
    name, _, keys = reference.partition(": ")
    value = find_document(name)
    for key in keys.split():
        if not isinstance(value, list):
            value = value[key]
        elif key.isdigit():
            value = value[int(key)]
        else:
            (value,) = [element for element in value if element["name"] == key]
    return value


# ── all files ────────────────────────────────────────────────────────────────────────────────────────────────────

VALUES: list[tuple[str, Any]] = [
    # The first collector tier sends each trace to one sampler.
    ("balancer: routing_key", "traceID"),
    ("balancer: retry_on_failure enabled", True),
    ("balancer: sending_queue enabled", True),
    ("front: service pipelines traces exporters", ["load_balancing"]),
    ("collector: exporters otlp_http/prometheus endpoint", "http://prometheus:9090/api/v1/otlp"),
    ("prometheus: rule_files", ["/etc/prometheus/rules/*.rules.yml"]),
    ("prometheus: alerting alertmanagers", [{"static_configs": [{"targets": ["alertmanager:9093"]}]}]),
    # Every Grafana visitor is a viewer without a login.
    ("grafana: GF_AUTH_ANONYMOUS_ENABLED", "true"),
    ("grafana: GF_AUTH_ANONYMOUS_ORG_ROLE", "Viewer"),
    ("grafana: GF_AUTH_DISABLE_LOGIN_FORM", "true"),
    ("grafana: GF_AUTH_BASIC_ENABLED", "false"),
    ("grafana: GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION", "true"),
    # An anonymous viewer can follow an exemplar into Explore.
    ("grafana: GF_USERS_VIEWERS_CAN_EDIT", "true"),
    ("datasources: datasources Prometheus jsonData exemplarTraceIdDestinations 0 name", "trace_id"),
    ("datasources: datasources Prometheus jsonData exemplarTraceIdDestinations 0 datasourceUid", "tempo"),
    ("datasources: datasources Prometheus type", "prometheus"),
    ("datasources: datasources Prometheus uid", "prometheus"),
    ("datasources: datasources Tempo type", "tempo"),
    ("datasources: datasources Tempo uid", "tempo"),
    ("sidecar: resources", ["../base"]),
    ("sidecar: patches", [{"path": "sidecar.yaml"}]),
    ("Namespace: metadata labels pod-security.kubernetes.io/enforce", "restricted"),
    ("gateway pod: containers collector args", ["--config=/etc/otelcol-contrib/collector.yaml"]),
    ("server: metadata annotations instrumentation.opentelemetry.io/inject-python", "true"),
    ("server: metadata annotations instrumentation.opentelemetry.io/container-names", "server"),
    ("ScaledObject: spec scaleTargetRef name", "llm-server"),
    # Metrics are scraped from the server, and are not exported a second time.
    ("Instrumentation: spec python env OTEL_METRICS_EXPORTER value", "none"),
    ("otel-infer: env OTEL_METRICS_EXPORTER value", "none"),
    # An init container that is always restarted keeps running, and ends after the other containers.
    ("otel-infer: restartPolicy", "Always"),
    ("server: spec volumes rings emptyDir medium", "Memory"),
]


@pytest.mark.parametrize(("reference", "expected"), VALUES, ids=[reference for reference, _ in VALUES])
def test_a_value_is_the_required_one(reference: str, expected: Any) -> None:
    assert find_value(reference) == expected


def test_an_image_has_the_same_version_everywhere() -> None:
    images = {text for path in FILES for key, text in iter_strings(documents(path)) if key == "image"}
    images |= set(re.findall(r"^FROM (\S+)", (STACK / "Dockerfile").read_text(), re.MULTILINE))
    assert len(images) > 6
    repositories = [image.partition("@")[0].rpartition(":")[0] for image in images]
    assert sorted(repositories) == sorted(set(repositories)), images
    assert [image for image in images if not re.search(r":v?\d+\.\d+[^/]*$", image)] == []


@each_file([*FILES, *READMES])
def test_every_otel_infer_variable_exists(path: Path) -> None:
    variables = {setting.variable for setting in SETTINGS.values()}
    assert set(re.findall(r"\bOTEL_INFER_[A-Z_]+\b", path.read_text())) <= variables


@pytest.mark.parametrize("target", ["compose", "kubernetes"])
def test_settings_are_accepted(target: str) -> None:
    environ = find_document("demo environment") if target == "compose" else configmap_settings()
    assert parse_settings(environ) != Config()


def test_queries_use_exported_series_and_labels() -> None:
    names = {name for metric in semconv.METRICS for name in prometheus.series_names(metric)}
    labels = {
        prometheus.label_name(attribute) for metric in semconv.METRICS for attribute in metric.attributes
    }
    labels |= {"le", "namespace"}
    sources = find_value("datasources: datasources")
    tables = [source["jsonData"].get("tracesToMetrics", {}).get("queries", []) for source in sources]
    queries = [query["query"] for table in tables for query in table]
    queries += [trigger["metadata"]["query"] for trigger in find_value("ScaledObject: spec triggers")]
    assert len(queries) > 4
    for query in queries:
        selected = re.findall(r"([a-z_:]+)\{([^}]*)\}", query.replace("$$__tags", ""))
        assert selected, query
        for name, selectors in selected:
            assert name in names, query
            for label, value in re.findall(r'([a-z_]+)="([^"]*)"', selectors):
                assert label in labels, query
                if label == prometheus.label_name(semconv.REQUEST_STATE):
                    assert value in Assembler().count_active(), query
        for grouped in re.findall(r"\bby \(([^)]*)\)", query):
            assert set(grouped.split(", ")) <= labels, query


@each_file(READMES)
def test_links_and_commands_of_a_page_are_valid(path: Path) -> None:
    text = path.read_text()
    for target in re.findall(r"\]\(([^)#]+)", text):
        assert (path.parent / target).exists(), target
    for line in "\n".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL)).splitlines():
        words = [word for word in shlex.split(line) if "=" not in word or word.startswith("-")]
        for word in words:
            if word.startswith("examples/") or word.endswith(".yml"):
                assert (ROOT / word).exists(), line
        if "otel-infer" in words:
            cli.build_parser().parse_args(words[len(words) - words[::-1].index("otel-infer") :])


# ── compose ──────────────────────────────────────────────────────────────────────────────────────────────────────


def services(path: Path) -> Any:
    return read(path)["services"]


def parse_settings(environ: dict[str, Any]) -> Config:
    return from_env({name: str(value) for name, value in environ.items()})


def mounts(service: dict[str, Any]) -> dict[str, Path]:
    """Returns the files and folders of this repository that a service mounts, by their path in the container."""
    volumes = [volume.split(":") for volume in service.get("volumes", ())]
    return {target: ROOT / source for source, target, *_ in volumes if source.startswith(".")}


SERVICES = [(path, name) for path in COMPOSE_FILES for name in services(path)]


@pytest.mark.parametrize(("path", "name"), SERVICES, ids=[f"{path.name}: {name}" for path, name in SERVICES])
def test_a_container_is_unprivileged_and_mounts_its_configuration(path: Path, name: str) -> None:
    service = services(path)[name]
    volumes = service.get("volumes", ())
    assert [source for source in mounts(service).values() if not source.exists()] == []
    assert [v for v in volumes if v.startswith(".") and not (v.endswith(":ro") and ":/" in v)] == []
    mounted = {*mounts(services(COMPOSE).get(name, {})), *mounts(service)}
    options = [re.match(r"-?-config(?:\.file)?=(.+)", word) for word in service.get("command", ())]
    assert {option[1] for option in options if option} <= mounted
    assert not {"privileged", "cap_add", "network_mode", "pid", "userns_mode"} & set(service)
    if "image" in service:
        hardened = {"read_only": True, "cap_drop": ["ALL"], "security_opt": ["no-new-privileges:true"]}
        assert service.items() >= hardened.items()
        assert "docker.sock" not in str(volumes)


def test_declared_volumes_are_the_used_ones() -> None:
    volumes = [volume for service in services(COMPOSE).values() for volume in service.get("volumes", ())]
    used = {volume.partition(":")[0] for volume in volumes if not volume.startswith(".")}
    assert used == set(find_value("compose: volumes"))


def test_every_port_is_on_loopback() -> None:
    published = [port for path, name in SERVICES for port in services(path)[name].get("ports", ())]
    assert len(published) > 4
    assert [port for port in published if not str(port).startswith("127.0.0.1:")] == []


@each_file(STACK_FILES)
def test_every_host_is_a_service(path: Path) -> None:
    known = {*services(COMPOSE), *services(STACK / "compose.collectors.yml")}
    known |= {"localhost", "0.0.0.0", "127.0.0.1"}
    for _, text in (pair for document in documents(path) for pair in iter_strings(document)):
        # `host:port`, with or without a scheme
        assert set(re.findall(r"(?:^|//)([a-z0-9.]+):\d+(?=$|/)", text)) <= known, text


def test_the_demo_image_is_built_from_existing_files() -> None:
    recipe = (STACK / "Dockerfile").read_text()
    ignored = (STACK / "Dockerfile.dockerignore").read_text().splitlines()
    copied = [
        source for line in re.findall(r"^COPY (.+) \S+$", recipe, re.MULTILINE) for source in line.split()
    ]
    assert ignored[0] == "*"
    assert set(copied) == {line[1:] for line in ignored if line.startswith("!")}
    assert [source for source in copied if not (ROOT / source).exists()] == []
    torch = re.search(r"^TORCH +\?= (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert torch
    assert f"torch=={torch[1]}" in recipe
    build = find_value("compose: services server build")
    assert (ROOT / build["context"] / build["dockerfile"]).is_file()
    assert "build" not in services(COMPOSE)["load"], "the second export of the same image would fail"
    assert find_value("compose: services load image") == find_value("compose: services server image")


def test_the_demo_serves_the_requested_model() -> None:
    load = (STACK / "load.py").read_text()
    (model,) = re.findall(r'^MODEL = "(.+)"$', load, re.MULTILINE)
    assert f'"transformers", "serve", "{model}"' in (STACK / "Dockerfile").read_text()
    assert f"Path('{model}')" in (STACK / "Dockerfile").read_text()
    assert model in find_value("server: spec containers server")["command"]


# ── collectors ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", COLLECTORS)
def test_a_collector_uses_what_it_defines_and_limits_memory(name: str) -> None:
    config = find_document(name)
    pipelines = config["service"]["pipelines"].values()
    for kind in ("receivers", "processors", "exporters"):
        used = {component for pipeline in pipelines for component in pipeline.get(kind, ())}
        assert used - set(config.get("connectors", ())) == set(config.get(kind, ())), kind
    assert set(config.get("extensions", ())) == set(config["service"].get("extensions", ()))
    assert set(config) <= {*DEPRECATED, "service"}
    for kind, deprecated in DEPRECATED.items():
        assert {component.partition("/")[0] for component in config.get(kind, ())} & deprecated == set()
    assert {pipeline["processors"][0] for pipeline in pipelines} == {"memory_limiter"}


def test_tail_sampling_keeps_requests_with_a_keep_reason() -> None:
    policies = {
        policy["name"]: policy[policy["type"]]
        for policy in find_value("tail sampling: processors tail_sampling policies")
    }
    kept = policies["kept-for-a-reason"]
    names = ("BUDGET", "SAMPLED", "ALL", "NONE", "UNSAMPLED")
    ordinary = {getattr(semconv, f"KEEP_REASON_{name}") for name in names}
    assert kept["key"] == semconv.KEEP_REASON
    assert sorted(kept["values"]) == sorted({*semconv.KEEP_REASONS} - ordinary)
    assert {*semconv.PRIORITY_REASONS} < {*kept["values"]}
    assert policies["starts-and-checks"]["span"] == [
        f'span.name == "{name}"' for name in (semconv.SPAN_SERVER_START, semconv.SPAN_DOCTOR)
    ]


def test_tail_sampling_waits_longer_than_a_held_request() -> None:
    sampling = find_value("tail sampling: processors tail_sampling")
    after_root = float(sampling["decision_wait_after_root_received"].removesuffix("s"))
    assert (
        tail_sampler.MAX_HOLD_NS / 1e9 + 5 < after_root < float(sampling["decision_wait"].removesuffix("s"))
    )


def test_the_first_tier_balances_traces_and_no_metrics() -> None:
    assert find_value("balancer: resolver dns hostname") in services(STACK / "compose.collectors.yml")
    assert "load_balancing" not in find_value("front: service pipelines metrics exporters")
    tail_sampling = services(STACK / "compose.tail-sampling.yml")["collector"]
    assert find_value("compose, collectors: services sampler command") == tail_sampling["command"]


@pytest.mark.parametrize("name", COLLECTORS)
def test_the_collector_accepts_its_files(name: str, tmp_path: Path) -> None:
    """The health check of the gateway is left out, because a Collector without contributions has none."""
    files = COLLECTORS[name]
    if "extensions" in read(files[0]):
        config = {key: value for key, value in read(files[0]).items() if key != "extensions"}
        config["service"] = {key: value for key, value in config["service"].items() if key != "extensions"}
        files = [tmp_path / files[0].name]
        files[0].write_text(yaml.safe_dump(config))
    completed = subprocess.run(
        [tool("otelcol"), "validate", *(f"--config={file}" for file in files)],
        capture_output=True,
        text=True,
        env={"TEMPO_ENDPOINT": "tempo:4317"},
    )
    assert completed.returncode == 0, completed.stderr


# ── Prometheus, Tempo, Alertmanager ──────────────────────────────────────────────────────────────────────────────


def test_prometheus_accepts_otlp_exemplars_and_remote_writes() -> None:
    assert find_value("prometheus: storage exemplars max_exemplars") > 0
    assert find_value("prometheus: otlp translation_strategy") in (prometheus.__doc__ or "")
    writes = find_value("tempo: metrics_generator storage remote_write")
    flags = find_value("compose: services prometheus command")
    assert ("--web.enable-remote-write-receiver" in flags) == bool(writes)
    assert {"--web.enable-otlp-receiver", "--enable-feature=exemplar-storage"} <= set(flags)


def test_prometheus_loads_the_generated_rules() -> None:
    folder = mounts(services(COMPOSE)["prometheus"])["/etc/prometheus/rules"]
    assert folder == RULES
    assert list(folder.glob("*.rules.yml"))


def test_the_tempo_configuration_fits_tempo_3() -> None:
    config = read(STACK / "tempo.yaml")
    assert TEMPO_2 & set(config) == set()
    assert "local-blocks" not in find_value("tempo: overrides defaults metrics_generator processors")
    receiver = find_value("tempo: distributor receivers otlp protocols grpc")
    endpoint = find_value("collector: exporters otlp_grpc/tempo endpoint")
    assert receiver["endpoint"].rpartition(":")[2] == endpoint.rpartition(":")[2]
    assert receiver["max_recv_msg_size_mib"] > 4
    assert "tempo:/var/tempo" in find_value("compose: services tempo volumes")
    for written in ("storage trace local", "storage trace wal", "metrics_generator storage"):
        assert find_value(f"tempo: {written}")["path"].startswith("/var/tempo/"), written


def test_a_page_reaches_the_flight_recorder_in_time() -> None:
    config = read(STACK / "alertmanager.yml")
    receivers = {receiver["name"]: receiver for receiver in config["receivers"]}
    (route,) = config["route"]["routes"]
    (hook,) = receivers[route["receiver"]]["webhook_configs"]
    assert config["route"]["receiver"] in receivers
    assert 'severity = "page"' in route["matchers"]
    port = find_document("demo environment")["OTEL_INFER_DUMP_PORT"].rpartition(":")[2]
    assert hook["url"] == f"http://server:{port}/dump"
    assert int(config["route"]["group_wait"].removesuffix("s")) <= 10


def test_a_page_inhibits_cause_alerts_except_lost_telemetry() -> None:
    alerts = {ALERT_PREFIX + cause.name for cause in cause_alerts.CAUSE_ALERTS}
    severities = {cause.severity for cause in cause_alerts.CAUSE_ALERTS}
    inhibitions = find_value("alertmanager: inhibit_rules")
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


def test_grafana_reads_the_provisioned_folders_without_a_password() -> None:
    assert not [name for name in find_document("grafana") if "PASSWORD" in name]
    mounted = mounts(services(COMPOSE)["grafana"])
    for kind in ("datasources", "dashboards"):
        assert mounted[f"/etc/grafana/provisioning/{kind}"] == GRAFANA / kind
    (provider,) = find_value("dashboards: providers")
    home = Path(find_value("grafana: GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"))
    assert mounted[provider["options"]["path"]] == ROOT / "dashboards"
    assert str(home.parent) == provider["options"]["path"]
    assert (ROOT / "dashboards" / home.name).is_file()


@each_file(sorted(GRAFANA.rglob("*.yaml")))
def test_dollar_signs_for_grafana_are_doubled(path: Path) -> None:
    """Grafana substitutes environment variables in its provisioning files."""
    text = "\n".join(line for line in path.read_text().splitlines() if not line.startswith("#"))
    assert [run for run in re.findall(r"\$+", text) if len(run) % 2] == []


def test_every_referenced_datasource_exists() -> None:
    uids = {source["uid"] for source in find_value("datasources: datasources")}
    text = DOCUMENTS["datasources"].read_text()
    assert set(re.findall(r"datasourceUid: (\S+?)[,\s]", text)) <= uids


def test_the_scrape_interval_is_the_export_interval() -> None:
    interval = parse_settings(find_document("demo environment")).metric_export_interval_ms
    assert find_value("prometheus: global scrape_interval") == f"{interval // 1000}s"
    assert find_value("datasources: datasources Prometheus jsonData timeInterval") == f"{interval // 1000}s"


# ── Kubernetes ───────────────────────────────────────────────────────────────────────────────────────────────────


PATCH = read(DOCUMENTS["patch"])
MANIFEST_OBJECTS = [document for path in MANIFESTS for document in documents(path)]
OBJECTS = [built for built in MANIFEST_OBJECTS if built["kind"] != "Kustomization" and built is not PATCH]
DEPLOYMENTS = [built for built in MANIFEST_OBJECTS if built["kind"] == "Deployment"]


def find_object(kind: str, name: str = "") -> dict[str, Any]:
    """Returns the only object of this kind and name."""
    named = [built for built in OBJECTS if name in ("", built["metadata"]["name"])]
    (found,) = [built for built in named if built["kind"] == kind]
    return found


def pod_spec(deployment: dict[str, Any]) -> Any:
    return deployment["spec"]["template"]["spec"]


def configmap_settings() -> dict[str, Any]:
    """Returns the settings in the generated ConfigMap."""
    literals = find_value("base: configMapGenerator otel-infer literals")
    return dict(text.split("=", 1) for text in literals)


CONTAINERS = [
    (deployment, container)
    for deployment in DEPLOYMENTS
    for kind in ("containers", "initContainers")
    for container in pod_spec(deployment).get(kind, ())
    if "image" in container  # a container without an image only changes one of the base
]


def test_objects_have_versions_kinds_and_unique_names() -> None:
    assert all(built["apiVersion"] and built["kind"] for built in MANIFEST_OBJECTS)
    keys = [(built["kind"], built["metadata"]["name"]) for built in OBJECTS]
    assert len(keys) == len(set(keys)) > 8


def test_kustomize_lists_every_file_of_the_base() -> None:
    base = read(DOCUMENTS["base"])
    files = {file for generator in base["configMapGenerator"] for file in generator.get("files", ())}
    present = {path.name for path in (KUBERNETES / "base").glob("*.yaml")}
    assert {*base["resources"], *files} == present - {"kustomization.yaml"}


def test_pods_meet_the_restricted_standard() -> None:
    assert len(DEPLOYMENTS) == 3
    for deployment in DEPLOYMENTS:
        pod = pod_spec(deployment)
        if deployment is not PATCH:  # the pod's own fields are in the base
            assert pod["securityContext"]["runAsNonRoot"] is True
            assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
            assert pod["automountServiceAccountToken"] is False
        assert [volume for volume in pod.get("volumes", ()) if "hostPath" in volume] == []


@pytest.mark.parametrize(
    ("deployment", "container"),
    CONTAINERS,
    ids=[f"{deployment['metadata']['name']}: {container['name']}" for deployment, container in CONTAINERS],
)
def test_a_container_is_restricted_and_its_references_exist(
    deployment: dict[str, Any], container: dict[str, Any]
) -> None:
    restricted = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert container["securityContext"].items() >= {**restricted, "readOnlyRootFilesystem": True}.items()
    assert container["resources"]["limits"]["memory"]
    base = find_object("Deployment", deployment["metadata"]["name"])
    volumes = [volume for owner in (deployment, base) for volume in pod_spec(owner).get("volumes", ())]
    assert {mount["name"] for mount in container["volumeMounts"]} <= {volume["name"] for volume in volumes}
    sources = [source["configMapRef"]["name"] for source in container.get("envFrom", ())]
    sources += [volume["configMap"]["name"] for volume in volumes if "configMap" in volume]
    assert set(sources) <= {generator["name"] for generator in find_value("base: configMapGenerator")}
    probes = [container[key] for key in container if key.endswith("Probe")]
    probed = {probe["httpGet"]["port"] for probe in probes if "exec" not in probe}
    assert probed <= {port["name"] for port in container.get("ports", ())}


def namespace(name: str, **labels: str) -> dict[str, str]:
    return {"kubernetes.io/metadata.name": name, **labels}


def pod(name: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": name}


INFERENCE, MONITORING = namespace("inference"), namespace("monitoring")
CLIENTS = namespace("apps", **{"llm-clients": "true"})
PEERS: dict[str, tuple[dict[str, str], dict[str, str], set[tuple[str, str]]]] = {
    "a server": (INFERENCE, pod("llm-server"), {("gateway", "otlp-grpc"), ("gateway", "otlp-http")}),
    "Prometheus": (MONITORING, pod("prometheus"), {("gateway", "metrics"), ("llm-server", "metrics")}),
    "a client": (CLIENTS, pod("app"), {("llm-server", "http")}),
    "a stranger": (namespace("other"), pod("app"), set()),
    "a stranger in the namespace": (INFERENCE, pod("app"), set()),
    "a stranger with the server's name": (namespace("other"), pod("llm-server"), set()),
    "a stranger with Prometheus' name": (namespace("other"), pod("prometheus"), set()),
    "another pod of monitoring": (MONITORING, pod("grafana"), set()),
}
"""Labels of a pod's namespace and of a pod, and the (pod, port) that it may reach."""


def admits(policy: Any, peer_namespace: dict[str, str], peer: dict[str, str], port: str) -> bool:
    """Returns whether a network policy of the namespace `inference` admits this pod at this port."""

    def matches(source: Any) -> bool:
        selected = source.get("namespaceSelector", {"matchLabels": INFERENCE})["matchLabels"]
        wanted = source.get("podSelector", {"matchLabels": {}})["matchLabels"]
        return selected.items() <= peer_namespace.items() and wanted.items() <= peer.items()

    return any(
        any(map(matches, rule["from"])) and {"port": port} in rule["ports"]
        for rule in policy["spec"].get("ingress", ())
    )


@pytest.mark.parametrize(("peer_namespace", "peer", "reachable"), PEERS.values(), ids=PEERS)
def test_network_policies_admit_only_who_must_connect(
    peer_namespace: dict[str, str], peer: dict[str, str], reachable: set[tuple[str, str]]
) -> None:
    policies = [built for built in OBJECTS if built["kind"] == "NetworkPolicy"]
    assert {"podSelector": {}, "policyTypes": ["Ingress"]} in [policy["spec"] for policy in policies]
    found = {
        (name, port["name"])
        for name in ("gateway", "llm-server")
        for container in pod_spec(find_object("Deployment", name))["containers"]
        for port in container["ports"]
        for policy in policies
        if policy["spec"]["podSelector"].get("matchLabels") == pod(name)
        and admits(policy, peer_namespace, peer, port["name"])
    }
    assert found == reachable


CONNECTIONS = {
    ("load", "server"), ("server", "collector"), ("collector", "tempo"), ("collector", "prometheus"),
    ("collector", "sampler"), ("sampler", "tempo"), ("sampler", "prometheus"), ("tempo", "prometheus"),
    ("prometheus", "tempo"), ("prometheus", "alertmanager"), ("prometheus", "collector"), ("prometheus", "sampler"),
    ("grafana", "prometheus"), ("grafana", "tempo"), ("grafana", "alertmanager"), ("alertmanager", "server"),
}  # fmt: skip
APART = [
    ("load", "collector"),
    ("load", "alertmanager"),
    ("server", "tempo"),
    ("server", "sampler"),
    ("grafana", "server"),
]


def test_services_that_need_no_connection_share_no_network() -> None:
    networks = {
        name: {*services(path)[name]["networks"]}
        for path, name in SERVICES
        if "networks" in services(path)[name]
    }
    assert set().union(*networks.values()) == set(read(COMPOSE)["networks"])
    assert [pair for pair in CONNECTIONS if not networks[pair[0]] & networks[pair[1]]] == []
    assert [pair for pair in APART if networks[pair[0]] & networks[pair[1]]] == []


def test_the_server_starts_no_sidecar_beside_the_container() -> None:
    command = find_value("server: spec containers server")["command"]
    assert command[:3] == ["otel-infer", "run", "--"]
    (patched,) = find_value("patch: spec template spec containers")
    assert (patched["name"], patched["command"]) == ("server", command[3:])


@pytest.mark.parametrize(
    "selecting",
    [built for built in OBJECTS if built["kind"] in ("Deployment", "Service", "PodMonitor")],
    ids=lambda built: f"{built['kind']} {built['metadata']['name']}",
)
def test_a_selector_matches_one_pod_with_its_ports(selecting: dict[str, Any]) -> None:
    spec = selecting["spec"]
    labels = (spec["selector"].get("matchLabels") or spec["selector"]).items()
    pods = [deployment["spec"]["template"] for deployment in DEPLOYMENTS if deployment is not PATCH]
    if selecting["kind"] == "Deployment":
        assert labels <= spec["template"]["metadata"]["labels"].items()
        return
    (pod,) = [pod for pod in pods if labels <= pod["metadata"]["labels"].items()]
    ports = {port["name"] for container in pod["spec"]["containers"] for port in container["ports"]}
    selected = spec.get("podMetricsEndpoints") or spec["ports"]
    assert {port.get("targetPort", port.get("port")) for port in selected} <= ports


def test_traces_go_to_the_gateway_and_metrics_are_scraped() -> None:
    endpoint = find_value("Instrumentation: spec exporter endpoint")
    assert find_value("otel-infer: env OTEL_EXPORTER_OTLP_ENDPOINT value") == endpoint
    ports = find_value("Service/gateway: spec ports")
    assert endpoint in [f"http://gateway:{port['port']}" for port in ports]
    assert set(find_value("gateway: service pipelines")) == {"traces"}
    scraped = find_value("server: spec containers server ports metrics containerPort")
    assert configmap_settings()["OTEL_INFER_METRICS_PORT"] == f"0.0.0.0:{scraped}"


def test_server_and_sidecar_share_the_rings() -> None:
    (sidecar,) = find_value("patch: spec template spec initContainers")
    arguments = cli.build_parser().parse_args(sidecar["command"][1:])
    rings = configmap_settings()["OTEL_INFER_RINGS"]
    assert sidecar["command"][0] == "otel-infer"
    assert arguments.rings == rings
    for container in (sidecar, find_value("server: spec containers server")):
        assert {"name": "rings", "mountPath": rings} in container["volumeMounts"]
        assert "runAsUser" not in container["securityContext"]
        assert {"configMapRef": {"name": "otel-infer"}} in container["envFrom"]
    user = find_value("server: spec securityContext runAsUser")
    assert sidecar["startupProbe"]["exec"]["command"][-1] == f"{rings}/otel_infer-{user}/sidecar.lock"


def test_the_autoscaler_scales_on_the_queue() -> None:
    scaled = find_object("Deployment", find_value("ScaledObject: spec scaleTargetRef name"))
    assert "replicas" not in scaled["spec"]
    triggers = [trigger["metadata"] for trigger in find_value("ScaledObject: spec triggers")]
    namespace = find_value("Namespace: metadata name")
    assert 'infer_request_state="queued"' in triggers[0]["query"]
    for trigger in triggers:
        assert trigger["ignoreNullValues"] == "false"
        assert f'namespace="{namespace}"' in trigger["query"]


def test_dashboards_and_rules_become_objects_unchanged(tmp_path: Path) -> None:
    source = {"groups": [{"name": "a", "rules": [{"alert": "A", "expr": "vector(1)\n  > 0"}]}]}
    folder = tmp_path / "examples" / "kubernetes"
    alerts = tmp_path / "dashboards" / "alerts"
    for created in (folder, alerts):
        created.mkdir(parents=True)
    shutil.copy(KUBERNETES / "dashboards_and_rules.py", folder)
    (alerts.parent / "overview.json").write_text('{"title": "ümlaut \\" ${x}"}\n')
    (alerts / "causes.rules.yml").write_text("# why\n" + yaml.safe_dump(source))
    dashboard, rule = print_objects(
        sys.executable, folder / "dashboards_and_rules.py", "--namespace", "seen", "--label", "release=mine"
    )
    assert dashboard["data"] == {"overview.json": (alerts.parent / "overview.json").read_text()}
    assert rule["spec"] == source
    assert rule["metadata"] == {
        "name": "otel-infer-causes",
        "namespace": "seen",
        "labels": {"release": "mine"},
    }


def test_generated_objects_fit_the_size_limit() -> None:
    objects = print_objects(sys.executable, KUBERNETES / "dashboards_and_rules.py")
    kinds = [printed["kind"] for printed in objects]
    for kind, files in (("ConfigMap", "*.json"), ("PrometheusRule", "alerts/*.rules.yml")):
        assert kinds.count(kind) == len(list((ROOT / "dashboards").glob(files))) > 0
    for printed in objects:
        assert len(yaml.safe_dump(printed)) < 1 << 20
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", printed["metadata"]["name"])


# ── with external tools ──────────────────────────────────────────────────────────────────────────────────────────


def run_tool(*command: str) -> str:
    """Returns the output of a command, which has to succeed."""
    completed = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return completed.stdout


def print_objects(*command: str | Path) -> list[Any]:
    """Returns the YAML documents that a command prints."""
    return list(yaml.load_all(run_tool(*map(str, command)), Loader=_StrictLoader))


def test_promtool_accepts_the_prometheus_configuration(tmp_path: Path) -> None:
    promtool = tool("promtool")
    version = re.search(r"version (\d+)\.", run_tool(promtool, "--version"))
    if version is None or int(version[1]) < 3:
        pytest.skip("promtool is older than Prometheus 3, and does not know its configuration")
    config = {**read(STACK / "prometheus.yml"), "rule_files": [f"{RULES}/*.rules.yml"]}
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    assert "SUCCESS" in run_tool(promtool, "check", "config", str(tmp_path / "prometheus.yml"))


def test_amtool_accepts_the_alertmanager_configuration() -> None:
    assert "SUCCESS" in run_tool(tool("amtool"), "check-config", str(STACK / "alertmanager.yml"))


@pytest.mark.parametrize(
    ("alert", "severity", "receiver"),
    [
        ("OtelInferServerGone", "page", "flight-recorder"),
        ("OtelInferQueueGrowing", "ticket", "nobody"),
        ("OtelInferWatchdog", "none", "nobody"),
        ("AlertOfAnotherSystem", "page", "nobody"),
    ],
)
def test_amtool_routes_an_alert(alert: str, severity: str, receiver: str) -> None:
    options = ["config", "routes", "test", f"--config.file={STACK / 'alertmanager.yml'}"]
    labels = [f"alertname={alert}", f"severity={severity}"]
    assert run_tool(tool("amtool"), *options, *labels).split() == [receiver]


@pytest.mark.parametrize(("variant", "init_containers"), [("base", [0, 0]), ("sidecar", [0, 1])])
def test_kustomize_builds_objects_with_resolved_references(variant: str, init_containers: list[int]) -> None:
    objects = print_objects(tool("kubectl"), "kustomize", KUBERNETES / variant)
    generated = {built["metadata"]["name"] for built in objects if built["kind"] == "ConfigMap"}
    namespaces = {built["metadata"].get("namespace") for built in objects if built["kind"] != "Namespace"}
    assert namespaces == {"inference"}
    pods = [pod_spec(built) for built in objects if built["kind"] == "Deployment"]
    referenced = {
        volume["configMap"]["name"] for pod in pods for volume in pod["volumes"] if "configMap" in volume
    }
    for pod in pods:
        for container in [*pod["containers"], *pod.get("initContainers", ())]:
            referenced |= {source["configMapRef"]["name"] for source in container.get("envFrom", ())}
    assert referenced == generated
    assert [len(pod.get("initContainers", ())) for pod in pods] == init_containers
