"""`otel-infer doctor`: each check returns a state, a finding and a remedy."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks import gpu_verify
from otel_infer import _version
from otel_infer.cli.doctor import command as doctor
from otel_infer.cli.doctor import environment, exporter, instrumentations, probe_process, shared_memory
from otel_infer.cli.doctor.check import Check
from otel_infer.config.environment import Config
from otel_infer.config.redaction import list_secrets, mask_secrets
from otel_infer.export.otlp.sdk_adapter import IncompatibleSdk
from otel_infer.gpu import nvml
from otel_infer.gpu.nvml import NvmlState
from otel_infer.instrumentation import registry
from otel_infer.instrumentation.hooks.instrumentor import Instrumentor
from otel_infer.ringbuffer import directory
from otel_infer.ringbuffer.arena import FileArena, RingUnavailable
from otel_infer.ringbuffer.writer import RequestWriter
from otel_infer.sidecar import launcher

ROOT = Path(__file__).parents[4]
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


def states(checks: list[Check]) -> dict[str, str]:
    return {check.name: check.state for check in checks}


# ── versions and configuration ───────────────────────────────────────────────────────────────────────────────────


def expect(check: Check, state: str, found: str = "", do: str = "") -> None:
    """Compares a check's state and looks for words in its finding and its remedy; | separates them."""
    missing = [word for word in found.split("|") if word not in check.found]
    missing += [word for word in do.split("|") if word not in check.do]
    assert (check.state, missing) == (state, []), check


def test_versions_include_the_interpreter() -> None:
    check = environment.check_versions(lambda name: "1.2.3")
    expect(check, "ok", f"{sys.executable}|numpy 1.2.3")
    assert not check.do


def test_replaced_urllib3_is_a_warning() -> None:
    check = environment.check_versions(lambda name: "1", lambda: True)
    expect(check, "warn", "urllib3-future", "environment")


def test_missing_package_has_an_install_command() -> None:
    check = environment.check_versions(lambda name: None if name == "numpy" else "1")
    expect(check, "fail", do=f"{sys.executable} -m pip install numpy")
    assert "ok" == environment.check_versions(lambda name: None if name.endswith("grpc") else "1").state


@pytest.mark.parametrize(
    ("environ", "state", "found", "do"),
    [
        pytest.param({}, "warn", "", f"{ENDPOINT}|otel-infer run", id="no destination"),
        pytest.param(
            {"OTEL_INFER_STEPS": "some"},
            "fail",
            "OTEL_INFER_STEPS='some'|all, auto, off",
            "OTEL_INFER_STEPS",
            id="invalid value",
        ),
        pytest.param(
            {"OTEL_INFER_STEP_BUDGT": "5"}, "warn", "", "OTEL_INFER_STEP_BUDGET ", id="mistyped name"
        ),
        *(
            pytest.param({variable: value}, "warn", variable, variable, id=f"disabled by {variable}")
            for variable, value in (
                ("OTEL_SDK_DISABLED", "true"),
                ("OTEL_INFER_ENABLED", "off"),
                ("OTEL_PYTHON_DISABLED_INSTRUMENTATIONS", "otel_infer"),
            )
        ),
    ],
)
def test_configuration_names_variable_and_remedy(
    environ: dict[str, str], state: str, found: str, do: str
) -> None:
    check = environment.check_configuration({**environ, ENDPOINT: "http://c:4318"} if environ else {})
    expect(check, state, found, do)


def test_disabled_signal_has_no_destination() -> None:
    check = environment.check_configuration({ENDPOINT: "http://c:4318", "OTEL_METRICS_EXPORTER": "none"})
    expect(check, "ok", "http://c:4318/v1/traces|OTEL_METRICS_EXPORTER")
    assert "/v1/metrics" not in check.found


@pytest.mark.parametrize(
    ("protocol", "environ", "expected"),
    [
        ("http/protobuf", {}, "http://localhost:4318/v1/metrics"),
        ("http/protobuf", {ENDPOINT: "http://c:1/base/"}, "http://c:1/base/v1/metrics"),
        (
            "http/protobuf",
            {ENDPOINT: "http://c:1", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://m"},
            "http://m",
        ),
        (
            "http/protobuf",
            {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://t"},
            "http://localhost:4318/v1/metrics",
        ),
        ("grpc", {}, "http://localhost:4317"),
        ("grpc", {ENDPOINT: "http://c:4317"}, "http://c:4317"),
    ],
)
def test_endpoint_follows_the_rules_of_the_exporters(
    protocol: str, environ: dict[str, str], expected: str
) -> None:
    assert expected == environment.resolve_endpoint("metrics", protocol, environ)


def test_credentials_are_masked_everywhere() -> None:
    environ = {"OTEL_EXPORTER_OTLP_TRACES_HEADERS": "authorization=Bearer%20canary1,x-key=canary2, a=b"}
    text = "to http://me:canary3@h:1/v1/traces?key=canary4 with Bearer canary1, canary1 and canary2, ab"
    assert "to http://***@h:1/v1/traces?*** with ***, *** and ***, ab" == mask_secrets(
        text, list_secrets(environ)
    )


# ── GPU ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_missing_nvidia_driver_is_ok() -> None:
    check = environment.check_gpu(NvmlState("no driver"))
    assert ("ok", "") == (check.state, check.do)
    assert environment.HOST_TIMING in check.found


def test_driver_is_listed_with_devices_and_timing_status() -> None:
    check = environment.check_gpu(NvmlState("ready", "580.1", ("NVIDIA H200", "NVIDIA H200")))
    assert "ok" == check.state
    assert "580.1: NVIDIA H200, NVIDIA H200" in check.found
    assert _version.GPU_TIMING_STATUS in check.found


def test_gpu_timing_status_matches_the_measurements() -> None:
    """The status names the measured device, and states whether the code was changed since."""
    (measured,) = [json.loads(path.read_text()) for path in gpu_verify.RESULTS.glob("gpu-*.json")]
    assert _version.VERIFIED_GPU in measured["GPU"]
    assert _version.GPU_CODE_UNCHANGED == (measured["sources"] == gpu_verify.hash_sources())
    by_verdict = {line["claim"]: line["verdict"] for line in measured["lines"]}
    assert "fail" not in by_verdict.values()
    docs = (ROOT / "docs" / "gpu.md").read_text()
    assert not [
        claim for claim, verdict in by_verdict.items() if verdict == "inconclusive" and claim not in docs
    ]
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert _version.GPU_TIMING_STATUS in readme
    assert _version.GPU_TIMING_STATUS in (ROOT / "dashboards" / "gpu.json").read_text()


@pytest.mark.parametrize("status", ["no library", "no permission", "no package", "broken"])
def test_unavailable_nvml_has_a_remedy(status: nvml.NvmlStatus) -> None:
    check = environment.check_gpu(NvmlState(status, reason="NVMLError: unknown"))
    assert "warn" == check.state
    assert check.do


class NvmlError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__("raised by the test")
        self.value = value


def pynvml(**answers: Any) -> ModuleType:
    """Returns an NVML binding with two devices. Each of `answers` is returned or raised."""
    module = ModuleType("pynvml")
    codes = {
        "NVML_ERROR_LIBRARY_NOT_FOUND": 12,
        "NVML_ERROR_DRIVER_NOT_LOADED": 9,
        "NVML_ERROR_NO_PERMISSION": 4,
    }
    defaults = {
        "nvmlInit": None,
        "nvmlShutdown": None,
        "nvmlSystemGetDriverVersion": b"580.1",
        "nvmlDeviceGetCount": 2,
        "nvmlDeviceGetHandleByIndex": 7,
        "nvmlDeviceGetName": "H200",
    }
    for name, value in {**defaults, **answers}.items():

        def call(*_: object, value: Any = value) -> Any:
            if isinstance(value, Exception):
                raise value
            return value

        setattr(module, name, call)
    for name, code in codes.items():
        setattr(module, name, code)
    return module


def test_nvml_state_decodes_text_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", pynvml())
    assert NvmlState("ready", "580.1", ("H200", "H200")) == nvml.query_state()


@pytest.mark.parametrize(
    ("code", "driver", "status"),
    [
        (12, False, "no driver"),
        (12, True, "no library"),
        (9, True, "no driver"),
        (4, True, "no permission"),
        (999, True, "broken"),
    ],
)
def test_nvml_error_code_determines_the_status(
    code: int, driver: bool, status: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(nvml, "DRIVER_FILE", tmp_path if driver else tmp_path / "none")
    monkeypatch.setitem(sys.modules, "pynvml", pynvml(nvmlInit=NvmlError(code)))
    assert status == nvml.query_state().status


def test_nvml_query_never_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        sys.modules, "pynvml", pynvml(nvmlSystemGetDriverVersion=OSError("gone"), nvmlShutdown=OSError())
    )
    assert NvmlState("broken", reason="OSError: gone") == nvml.query_state()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert NvmlState("no package") == nvml.query_state()


# ── integrations ─────────────────────────────────────────────────────────────────────────────────────────────────


def probe_status(state: str = "active", **changes: Any) -> dict[str, Any]:
    """Returns the status of an integration, as the probe process reports it."""
    defaults = {
        "name": "lib",
        "distribution": "lib-dist",
        "version": "5.0",
        "state": state,
        "hooks_active": 3,
        "hooks_total": 4,
        "drift": None,
        "engine": True,
        "parts": [],
    }
    return {**defaults, **changes}


def part(name: str, state: str, drift: str | None = None, refused: str = "") -> dict[str, Any]:
    return {"name": name, "state": state, "drift": drift, "refused": refused}


PARTS_BY_ROLE = [
    {**part("a", "active"), "where": "API server", "hooks_active": 2, "hooks_total": 2},
    {**part("b", "active"), "where": "engine core", "hooks_active": 1, "hooks_total": 2},
    {**part("c", "active"), "where": "engine core", "hooks_active": 3, "hooks_total": 3},
]
WAITING = [
    part("", "active"),
    part("serve", "waiting", refused="there is no module fastapi"),
    part("new", "absent"),
]
DRIFTED = [part("generate", "active"), part("batching", "drifted", "lib.a:B.c: there is no c")]


@pytest.mark.parametrize(
    ("status", "state", "found", "do"),
    [
        pytest.param(probe_status(), "ok", "lib-dist 5.0|3 of 4", "", id="active"),
        pytest.param(
            probe_status(parts=PARTS_BY_ROLE), "ok", "API server 2 of 2, engine core 4 of 5", "", id="roles"
        ),
        pytest.param(
            probe_status(unlisted="LIB_PLUGINS"), "warn", "LIB_PLUGINS", "otel-infer run", id="not in plugins"
        ),
        pytest.param(
            probe_status(parts=WAITING),
            "ok",
            "serve waits: there is no module fastapi|absent: new",
            "",
            id="waiting",
        ),
        pytest.param(
            probe_status("drifted", parts=DRIFTED),
            "fail",
            "lib.a:B.c: there is no c|batching is not recorded; everything else is",
            "lib-dist",
            id="one part drifted",
        ),
        pytest.param(
            probe_status("drifted", parts=[part("", "drifted", "lib:f: there is no f")]),
            "fail",
            "lib is not recorded|still runs",
            "",
            id="everything drifted",
        ),
        pytest.param(
            probe_status("waiting", parts=[part("", "waiting", refused="ImportError: libx.so")]),
            "warn",
            "ImportError: libx.so",
            f"{sys.executable} -c 'import lib'",
            id="failing import",
        ),
    ],
)
def test_integration_has_state_and_remedy(status: dict[str, Any], state: str, found: str, do: str) -> None:
    check = instrumentations.check_instrumentor(status, False)
    expect(check, state, found, do)
    assert check.name == "integration lib" and bool(check.do) == (state != "ok")


@pytest.mark.parametrize(("state", "off"), [("absent", False), ("active", True)])
def test_absent_or_disabled_integration_is_ok(state: str, off: bool) -> None:
    check = instrumentations.check_instrumentor(probe_status(state), off)
    assert ("ok", "") == (check.state, check.do)
    assert "hooks bound" not in check.found


@pytest.mark.parametrize(
    ("plugins", "omitted"), [(None, False), ("", True), ("a,b", True), ("a,otel_infer", False)]
)
def test_omission_from_plugin_list_is_detected(plugins: str | None, omitted: bool) -> None:
    assert instrumentations._omits_otel_infer(plugins) is omitted


def test_missing_engine_lists_the_supported_engines() -> None:
    check = instrumentations.check_engine(
        [probe_status("absent"), probe_status("active", engine=False, distribution="other")]
    )
    assert "warn" == check.state
    assert "lib-dist" in check.found
    assert sys.executable in check.found
    assert "pip install" in check.do
    assert "ok" == instrumentations.check_engine([probe_status("waiting")]).state


def test_endless_import_is_a_failed_check(monkeypatch: pytest.MonkeyPatch) -> None:
    timeout = probe_process.ProbeResult([probe_status(name="asgi", engine=False)], "took longer than 120 s")
    monkeypatch.setattr(probe_process, "run_in_subprocess", lambda *_: timeout)
    checks = instrumentations.check_instrumentations(Config(), imports=True)
    assert {"integration asgi": "ok", "integration wsgi": "fail"} == states(checks)
    assert "120 s" in checks[-1].found
    assert checks[-1].do


@pytest.mark.parametrize(
    ("settings", "off"),
    [
        (Config(), False),
        (Config(integrations=("asgi",)), True),
        (Config(integrations=("lib",)), False),
        (Config(disabled_integrations=("otel_infer_lib",)), True),
    ],
)
def test_configuration_can_disable_an_integration(settings: Config, off: bool) -> None:
    assert off == instrumentations.is_disabled("lib", settings)


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Instrumentor]:
    """An integration of a library with two modules. One of them cannot be imported."""
    (tmp_path / "doctored.py").write_text("def f(): ...\n")
    (tmp_path / "doctored_serving.py").write_text("import no_such_server\n")
    monkeypatch.syspath_prepend(tmp_path)
    integration = Instrumentor("doctored", "doctored", ("doctored",), is_engine=True)
    integration.patch_hot_path("doctored:f", part="generate")(lambda original, hook: original)
    integration.patch_hot_path("doctored:g", part="steps")(lambda original, hook: original)
    integration.patch_hot_path("doctored_serving:f", part="serve")(lambda original, hook: original)
    monkeypatch.setattr(registry, "load_instrumentors", lambda: [integration])
    yield integration
    integration.remove()
    sys.modules.pop("doctored", None)


def test_import_binds_the_waiting_hooks(library: Instrumentor) -> None:
    (status,) = instrumentations.run_probe({"excluded_urls": ""})
    parts = {part["name"]: (part["state"], part["refused"]) for part in status["parts"]}
    assert ("drifted", 1) == (status["state"], status["hooks_active"])
    assert {"generate", "steps", "serve"} == set(parts)
    assert ("active", "") == parts["generate"]
    assert "drifted" == parts["steps"][0]
    assert ("waiting", "there is no module no_such_server") == parts["serve"]
    assert json.dumps(status)


def test_no_imports_option_imports_nothing(library: Instrumentor) -> None:
    check, engine = instrumentations.check_instrumentations(Config(), imports=False)
    assert ("ok", "ok") == (check.state, engine.state)
    assert "0 of 3" in check.found
    assert "doctored" not in sys.modules


def test_import_that_exits_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "leaving.py").write_text("raise SystemExit('no licence\\nsecond line')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert "SystemExit: no licence" == instrumentations._find_import_error("leaving")
    assert "" == instrumentations._find_import_error("no_such_module.at_all")


# ── the probe process ─────────────────────────────────────────────────────────────────────────────────────────


def test_failed_probe_returns_its_last_line() -> None:
    results, error = probe_process.run_in_subprocess("no_such_check", {}, os.environ, 60.0)
    assert [] == results
    assert "status 1" in error and "ModuleNotFoundError" in error


def test_slow_probe_is_killed() -> None:
    result = probe_process.run_in_subprocess("instrumentations", {"excluded_urls": ""}, os.environ, 0.01)
    assert "longer than" in result.error


def test_results_before_a_crash_are_kept() -> None:
    assert [{"a": 1}] == probe_process._parse_lines(b'{"a": 1}\n{"b": ')
    assert "signal 11" in probe_process._describe_failure(-11, b"")
    assert "status 2" in probe_process._describe_failure(2, b"")


# ── exporter ─────────────────────────────────────────────────────────────────────────────────────────────────────


def export_result(accepted: int = 0, reason: str = "", log: str = "") -> dict[str, Any]:
    return {"accepted": accepted, "reason": reason, "log": log, "trace": "ab" * 16}


def test_accepted_span_has_its_trace_id() -> None:
    check = exporter.check_signal("spans", "http://c", export_result(1))
    assert ("ok", "") == (check.state, check.do)
    assert "ab" * 16 in check.found


GRPC_TO_HTTP = (
    "failed to connect; last error: UNAVAILABLE: ipv4:1: Failed parsing HTTP/2 (Expected SETTINGS frame)"
)


@pytest.mark.parametrize(
    ("reason", "log", "found", "do"),
    [
        ("connection refused", "", "connection refused", "start a collector there"),
        (
            "UNAVAILABLE",
            "Failed to connect to remote host: Connection refused",
            "connection refused",
            "start a",
        ),
        ("ConnectionError", "BadStatusLine('\\x00')", "speaks no HTTP/1", "is this the gRPC port 4317?"),
        ("UNAVAILABLE", GRPC_TO_HTTP, "speaks no gRPC", "is this the HTTP port 4318?"),
        ("name not resolved", "", "cannot be resolved", "correct the host"),
        ("TLS error", "", "TLS error", "OTEL_EXPORTER_OTLP_CERTIFICATE"),
        ("ProxyError", "", "proxy refused", "NO_PROXY"),
        ("HTTP 401", "upstream: Connection refused", "HTTP 401", "OTEL_EXPORTER_OTLP_HEADERS"),
        ("PERMISSION_DENIED", "", "PERMISSION_DENIED", "OTEL_EXPORTER_OTLP_HEADERS"),
        ("HTTP 404", "", "HTTP 404", "OTEL_METRICS_EXPORTER=none"),
        ("HTTP 429", "", "HTTP 429", "OTEL_INFER_STEP_BUDGET"),
        ("HTTP 500", "", "HTTP 500", "log"),
        ("UNAVAILABLE", "", "UNAVAILABLE", "log"),
        ("DEADLINE_EXCEEDED", "", "timed out", "OTEL_EXPORTER_OTLP_TIMEOUT"),
        (
            "",
            "Failed to export due to timeout, max retries or shutdown.",
            "timed out",
            "OTEL_EXPORTER_OTLP_TIMEOUT",
        ),
        ("took longer than 36 s", "", "timed out", "OTEL_EXPORTER_OTLP_TIMEOUT"),
        ("ModuleNotFoundError", "", "not installed", "pip install"),
        ("SomethingNew", "", "SomethingNew", "start a collector"),
        ("partial success: no tenant", "", "1 rejected: no tenant", "log"),
        ("", "", "no reason given", "start a collector"),
    ],
)
def test_refused_export_has_label_and_remedy(reason: str, log: str, found: str, do: str) -> None:
    check = exporter.check_signal("metrics", "http://c", export_result(0, reason, log))
    expect(check, "fail", found, do)


def test_warning_of_the_destination_is_included() -> None:
    check = exporter.check_signal("spans", "http://c", export_result(1, "partial success: slow down"))
    expect(check, "warn", "slow down")


@pytest.mark.parametrize(
    ("error", "do"),
    [
        (IncompatibleSdk.__name__, "tracer_provider"),
        ("ImportError", "pip install"),
        ("ValueError", "OTEL_EXPORTER_OTLP_"),
    ],
)
def test_unusable_exporter_fails_with_a_remedy(error: str, do: str) -> None:
    check = exporter.check_sdk_adapter({"error": error, "text": "the reason"}, "grpc")
    expect(check, "fail", "the reason", do)


def test_without_destination_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    sdk = {"what": "sdk", "error": "", "text": ""}
    monkeypatch.setattr(probe_process, "run_in_subprocess", lambda *_: probe_process.ProbeResult([sdk], ""))
    assert {"SDK exporter": "ok", "exporter": "warn"} == states(exporter.check_exporter(Config(), {}))


def test_aborted_trial_fails_every_missing_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    sdk = {"what": "sdk", "error": "", "text": ""}
    monkeypatch.setattr(
        probe_process,
        "run_in_subprocess",
        lambda *_: probe_process.ProbeResult([sdk], "took longer than 36 s"),
    )
    checks = exporter.check_exporter(Config(endpoint="http://c"), {ENDPOINT: "http://c"})
    assert {"SDK exporter": "ok", "exporter spans": "fail", "exporter metrics": "fail"} == states(checks)
    monkeypatch.setattr(
        probe_process, "run_in_subprocess", lambda *_: probe_process.ProbeResult([], "was ended by signal 11")
    )
    assert {"SDK exporter": "fail"} == states(exporter.check_exporter(Config(endpoint="http://c"), {}))


# ── shared memory ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def base() -> Iterator[Path]:
    """A private folder of the test on tmpfs."""
    if not directory.is_tmpfs(Path("/dev/shm")):
        pytest.skip("/dev/shm is no tmpfs on this machine")
    folder = directory.BASE / f"otel_infer-test-{os.getpid()}"
    folder.mkdir(mode=0o700)
    yield folder
    subprocess.run(["rm", "-r", str(folder)], check=True)


def rings(folder: Path, **changes: Any) -> Config:
    return Config(rings=str(folder), **changes)


def test_full_size_rings_fit_and_are_removed(base: Path) -> None:
    check, refused = shared_memory.check_shared_memory(rings(base))
    assert ("ok", "", "") == (check.state, check.do, refused)
    assert "mode: sidecar" in check.found and "full size" in check.found
    assert [] == list(base.iterdir())


def test_created_folders_are_removed_again(base: Path) -> None:
    check, _ = shared_memory.check_shared_memory(rings(base / "one" / "two"))
    assert "ok" == check.state
    assert [] == list(base.iterdir())


@pytest.mark.parametrize("mode", [0o1777, 0o755, 0o700])
def test_configured_folder_keeps_its_mode_and_files(mode: int, base: Path) -> None:
    (base / "other.txt").touch()
    base.chmod(mode)
    assert "ok" == shared_memory.check_shared_memory(rings(base))[0].state
    assert "ok" == shared_memory.check_sidecar(rings(base), "").state
    assert mode == base.stat().st_mode & 0o7777
    assert ["other.txt"] == [path.name for path in base.rglob("*") if path.is_file()]


def test_sidecar_accepts_a_relative_folder(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(base)
    assert "ok" == shared_memory.check_sidecar(rings(Path("here")), "").state
    assert [] == list(base.iterdir())


def test_reduced_rings_are_a_warning_with_a_remedy(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FileArena, "can_allocate", lambda self, size: size < 400_000)
    check, refused = shared_memory.check_shared_memory(rings(base))
    assert ("warn", "") == (check.state, refused)
    assert "1/4" in check.found
    assert "--shm-size=256m" in check.do


@pytest.mark.parametrize(
    ("mode", "state", "sidecar_state", "found"),
    [
        ("auto", "warn", "warn", "mode: in-process"),
        ("sidecar", "fail", "fail", "mode: off"),
        ("in-process", "ok", "ok", "OTEL_INFER_MODE=in-process"),
    ],
)
def test_mode_determines_severity_of_missing_shared_memory(
    mode: str, state: str, sidecar_state: str, found: str, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FileArena, "can_allocate", lambda self, size: False)
    settings = rings(base, mode=mode)
    check, refused = shared_memory.check_shared_memory(settings)
    assert state == check.state
    assert found in check.found
    assert (state != "ok") == ("--shm-size=256m" in check.do)
    assert sidecar_state == shared_memory.check_sidecar(settings, refused).state
    assert [] == list(base.iterdir())


def test_exhausted_ring_quota_suggests_another_folder(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FileArena, "remaining_bytes", lambda self: 0)
    check, _ = shared_memory.check_shared_memory(rings(base))
    assert "used up" in check.found
    assert "OTEL_INFER_RINGS" in check.do
    assert "--shm-size" not in check.do


def test_disk_is_not_shared_memory(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "is_tmpfs", lambda folder: False)
    check, refused = shared_memory.check_shared_memory(rings(base))
    assert "warn" == check.state
    assert str(base) in refused and "tmpfs" in refused
    assert "OTEL_INFER_RINGS" in check.do
    assert [] == list(base.iterdir())


def test_folder_of_another_user_is_refused(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can change the owner of a folder")
    monkeypatch.setattr(directory, "BASE", base)
    home = base / f"otel_infer-{os.getuid()}"
    home.mkdir()
    os.chown(home, 12345, -1)
    check, _ = shared_memory.check_shared_memory(Config())
    assert "warn" == check.state
    assert str(home) in check.found and "another user" in check.found


def test_frozen_interpreter_has_no_sidecar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    check = shared_memory.check_sidecar(Config(), "")
    expect(check, "ok", "in-process|frozen")


# ── sidecar ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_sidecar_starts_reads_and_exits(base: Path) -> None:
    check = shared_memory.check_sidecar(rings(base), "")
    assert ("ok", "") == (check.state, check.do), check.found
    assert [] == list(base.iterdir())


def test_trial_sidecar_leaves_dead_rings_alone(base: Path) -> None:
    dead = base / f"otel_infer-{os.getuid()}" / "1-dead"
    dead.mkdir(parents=True, mode=0o700)
    (dead / "1-a.requests").touch()
    assert "ok" == shared_memory.check_sidecar(rings(base), "").state
    assert ["1-a.requests"] == os.listdir(dead)


def test_unstartable_sidecar_is_replaced_by_a_thread(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise launcher.SidecarStartError("Resource temporarily unavailable")

    monkeypatch.setattr(launcher, "start_sidecar", refuse)
    check = shared_memory.check_sidecar(rings(base), "")
    expect(check, "warn", "Resource temporarily unavailable; mode: in-process", "OTEL_INFER_MODE=in-process")
    assert "fail" == shared_memory.check_sidecar(rings(base, mode="sidecar"), "").state
    assert [] == list(base.iterdir())


def start_python(code: str) -> Any:
    """Returns a replacement for `start_sidecar`, which starts Python with `code` instead."""
    return lambda *_, **__: subprocess.Popen([sys.executable, "-c", code])


def test_sidecar_that_exits_immediately_fails(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "start_sidecar", start_python("raise SystemExit(3)"))
    check = shared_memory.check_sidecar(rings(base), "")
    expect(check, "fail", "status 3")


def test_failed_sidecar_has_its_last_log_line(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(folder: Path, settings: Config, *_: object) -> Any:
        Path(settings.log).write_text("Traceback\nValueError: the last line\n")
        return start_python("raise SystemExit(1)")()

    monkeypatch.setattr(launcher, "start_sidecar", start)
    found = shared_memory.check_sidecar(rings(base), "").found
    assert found.endswith("status 1: ValueError: the last line")
    assert [] == list(base.iterdir())


def test_unresponsive_sidecar_is_killed(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    children: list[Any] = []
    start = start_python("import time; time.sleep(60)")
    monkeypatch.setattr(launcher, "start_sidecar", lambda *_, **__: children.append(start()) or children[0])
    monkeypatch.setattr(shared_memory, "START_S", 0.2)
    assert "lock" in shared_memory.check_sidecar(rings(base), "").found
    assert children[0].returncode is not None


def test_folder_with_a_sidecar_gets_no_second_sidecar(base: Path) -> None:
    code = (
        "import sys, pathlib; from otel_infer.ringbuffer import directory; "
        "lock = directory.FileLock(pathlib.Path(sys.argv[1])); print(lock.acquire(), flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(base / directory.SIDECAR_LOCK)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert "True\n" == holder.stdout.readline()
        check = shared_memory.check_sidecar(rings(base), "")
        assert "ok" == check.state
        assert f"{base} already" in check.found
        holder.communicate()


# ── leftovers ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_dead_rings_are_found_and_left_alone(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "BASE", base)
    assert "ok" == shared_memory.check_leftovers(Config()).state
    dead = directory.create_server_folder(base)
    arena = FileArena(dead)
    RequestWriter(arena, "1-a", "server")
    arena.close()
    before = [(path, path.stat().st_mtime_ns) for path in (dead, *sorted(dead.iterdir()))]
    check = shared_memory.check_leftovers(Config())
    expect(check, "warn", "1 dead server (", str(dead))
    assert before == [(path, path.stat().st_mtime_ns) for path in (dead, *sorted(dead.iterdir()))]


def test_dead_rings_in_configured_folder_are_found(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "BASE", base / "none")
    assert "ok" == shared_memory.check_leftovers(rings(base)).state
    arena = FileArena(base)
    RequestWriter(arena, "1-a", "server")
    arena.close()
    (base / "other.txt").touch()
    check = shared_memory.check_leftovers(rings(base))
    assert ("warn", True) == (check.state, str(base) in check.do)


def test_live_server_is_no_leftover(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "BASE", base)
    monkeypatch.setattr(directory, "is_held", lambda path: path.suffix == ".requests")
    folder = directory.create_server_folder(base)
    (folder / "1-a.requests").touch()
    assert "ok" == shared_memory.check_leftovers(Config()).state


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────

FINE = Check("versions", "ok", "all there")
WARNED = Check("engine", "warn", "none [bold]", "install one")
FAILED = Check("exporter", "fail", "http://me:canary@h: refused", "start it")


def run_doctor(monkeypatch: pytest.MonkeyPatch, *checks: Check, **options: Any) -> int:
    """Returns the exit status of a doctor with these checks."""
    monkeypatch.setattr(doctor, "iter_checks", lambda *_: [("all", lambda: list(checks))])
    return doctor.run(argparse.Namespace(**{"json": False, "imports": False, **options}))


def test_only_a_failed_check_exits_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 == run_doctor(monkeypatch, FINE, WARNED)
    assert 1 == run_doctor(monkeypatch, FINE, FAILED, WARNED)


def test_piped_output_is_aligned_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_doctor(monkeypatch, FINE, WARNED)
    assert [
        "ok    versions                  all there",
        "warn  engine                    none [bold]",
        "                                do: install one",
        "1 ok, 1 to look at, 0 failed",
    ] == capsys.readouterr().out.splitlines()


def test_json_output_is_one_object(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_doctor(monkeypatch, FINE, FAILED, json=True)
    expected = [FINE._asdict(), {**FAILED._asdict(), "found": "http://***@h: refused"}]
    assert {"checks": expected, "ok": False} == json.loads(capsys.readouterr().out)


def test_terminal_output_is_wrapped_without_markup(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Brackets in a finding are printed unchanged."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    run_doctor(monkeypatch, WARNED, FINE._replace(found="word " * 30))
    lines = capsys.readouterr().out.splitlines()
    assert any("none [bold]" in line for line in lines)
    assert any("→ install one" in line for line in lines)
    assert sum("word" in line for line in lines) > 3


def test_exception_becomes_a_failed_check() -> None:
    def broken() -> list[Check]:
        raise RingUnavailable("unforeseen")

    (check,) = doctor.run_check("leftovers", broken)
    assert ("leftovers", "fail") == (check.name, check.state)
    assert "RingUnavailable: unforeseen" in check.found


def test_every_problem_has_a_remedy(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "BASE", base)
    monkeypatch.setattr(FileArena, "can_allocate", lambda self, size: False)
    environ = {"OTEL_INFER_STEPS": "?", "PATH": os.environ["PATH"]}
    checks = [
        check
        for topic, function in doctor.iter_checks(environ, False)
        for check in doctor.run_check(topic, function)
    ]
    assert {"shared memory", "sidecar", "configuration", "exporter"} <= {
        c.name for c in checks if c.state != "ok"
    }
    assert [] == [check for check in checks if (check.state == "ok") == bool(check.do)]


def test_options_have_their_documented_defaults() -> None:
    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    assert {"json": False, "imports": True} == vars(parser.parse_args([]))
    assert {"json": True, "imports": False} == vars(parser.parse_args(["--json", "--no-imports"]))


def test_modules_in_working_directory_are_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit(7)")
    monkeypatch.chdir(tmp_path)
    options = {"excluded_urls": "", "imports": False}
    assert probe_process.run_in_subprocess("instrumentations", options, os.environ, 60.0).error == ""
