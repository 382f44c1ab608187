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
from otel_infer.cli.doctor.check import Check, mask_secrets
from otel_infer.config.environment import Config
from otel_infer.gpu import nvml
from otel_infer.gpu.nvml import NvmlState
from otel_infer.instrumentation import registry
from otel_infer.instrumentation.hooks.instrumentor import Instrumentor
from otel_infer.ringbuffer import directory
from otel_infer.ringbuffer.writer import FileArena, RequestWriter, RingUnavailable
from otel_infer.sidecar import launcher

ROOT = Path(__file__).parents[4]
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


def states(checks: list[Check]) -> dict[str, str]:
    return {check.name: check.state for check in checks}


# ── versions and configuration ───────────────────────────────────────────────────────────────────────────────────


def test_versions_are_named_with_the_interpreter_they_belong_to() -> None:
    check = environment.check_versions(lambda name: "1.2.3")
    assert ("ok", "") == (check.state, check.do)
    assert sys.executable in check.found
    assert "numpy 1.2.3" in check.found


def test_another_library_in_the_place_of_urllib3_is_a_warning() -> None:
    check = environment.check_versions(lambda name: "1", lambda: True)
    assert check.state == "warn"
    assert "urllib3 is replaced by urllib3-future" in check.found
    assert "an environment of its own" in check.do


def test_a_missing_library_is_to_be_installed_for_this_interpreter() -> None:
    check = environment.check_versions(lambda name: None if name == "numpy" else "1")
    assert ("fail", f"{sys.executable} -m pip install numpy") == (check.state, check.do)


def test_a_missing_grpc_exporter_is_no_fault() -> None:
    assert "ok" == environment.check_versions(lambda name: None if name.endswith("grpc") else "1").state


def test_nothing_configured_says_how_to_export() -> None:
    check = environment.check_configuration({})
    assert ("warn", "nothing is exported") == (check.state, check.found)
    assert ENDPOINT in check.do
    assert "otel-infer run" in check.do


def test_a_bad_value_names_the_variable_and_what_it_accepts() -> None:
    check = environment.check_configuration({"OTEL_INFER_STEPS": "some", ENDPOINT: "http://c:4318"})
    assert "fail" == check.state
    assert "OTEL_INFER_STEPS='some': expected one of all, auto, off" in check.found
    assert "set OTEL_INFER_STEPS to a value it accepts" in check.do


def test_a_mistyped_variable_is_told_which_one_was_meant() -> None:
    check = environment.check_configuration({"OTEL_INFER_STEP_BUDGT": "5", ENDPOINT: "http://c:4318"})
    assert ("warn", "set OTEL_INFER_STEP_BUDGET instead") == (check.state, check.do)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("OTEL_SDK_DISABLED", "true"),
        ("OTEL_INFER_ENABLED", "off"),
        ("OTEL_PYTHON_DISABLED_INSTRUMENTATIONS", "otel_infer"),
    ],
)
def test_who_switched_it_off_is_named(variable: str, value: str) -> None:
    check = environment.check_configuration({variable: value, ENDPOINT: "http://c:4318"})
    assert ("warn", f"switched off by {variable}", f"unset {variable}") == check[1:]


def test_a_signal_that_is_not_sent_is_said_to_be_none() -> None:
    check = environment.check_configuration({ENDPOINT: "http://c:4318", "OTEL_METRICS_EXPORTER": "none"})
    assert (
        "spans to http://c:4318/v1/traces (http/protobuf), no metrics, by OTEL_METRICS_EXPORTER"
        == check.found
    )


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
def test_the_destination_is_the_one_the_exporters_take(
    protocol: str, environ: dict[str, str], expected: str
) -> None:
    assert expected == environment.resolve_endpoint("metrics", protocol, environ)


def test_credentials_are_masked_wherever_they_stand() -> None:
    environ = {"OTEL_EXPORTER_OTLP_TRACES_HEADERS": "authorization=Bearer%20canary1,x-key=canary2, a=b"}
    said = "to http://me:canary3@h:1/v1/traces?key=canary4 with Bearer canary1, canary1 and canary2, ab"
    assert "to http://***@h:1/v1/traces?*** with ***, *** and ***, ab" == mask_secrets(said, environ)


# ── GPU ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_no_nvidia_driver_is_fine_and_times_are_the_hosts() -> None:
    check = environment.check_gpu(NvmlState("no driver"))
    found = f"no NVIDIA driver: GPU metrics are absent; the time of steps is the host's; GPU timing: {_version.GPU_TIMING_STATUS}"
    assert ("ok", found, "") == check[1:]


def test_a_driver_is_named_with_its_devices_and_on_what_timing_was_verified() -> None:
    check = environment.check_gpu(NvmlState("ready", "580.1", ("NVIDIA H200", "NVIDIA H200")))
    said = f"NVIDIA driver 580.1: NVIDIA H200, NVIDIA H200; GPU timing: {_version.GPU_TIMING_STATUS}"
    assert ("ok", said) == check[1:3]


def test_what_is_said_of_timing_on_a_gpu_is_what_was_measured() -> None:
    """On which device, and whether by the same code; where that was changed, everybody is told."""
    (measured,) = [json.loads(path.read_text()) for path in gpu_verify.RESULTS.glob("gpu-*.json")]
    assert _version.VERIFIED_GPU in measured["GPU"]
    assert _version.GPU_CODE_UNCHANGED == (measured["sources"] == gpu_verify.sources())
    by_verdict = {line["claim"]: line["verdict"] for line in measured["lines"]}
    assert "fail" not in by_verdict.values()
    said = (ROOT / "docs" / "gpu.md").read_text()
    assert not [
        claim for claim, verdict in by_verdict.items() if verdict == "inconclusive" and claim not in said
    ]
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert _version.GPU_TIMING_STATUS in readme
    assert _version.GPU_TIMING_STATUS in (ROOT / "dashboards" / "gpu.json").read_text()


@pytest.mark.parametrize("status", ["no library", "no permission", "no package", "broken"])
def test_an_nvml_that_should_answer_and_does_not_says_what_to_do(status: nvml.NvmlStatus) -> None:
    check = environment.check_gpu(NvmlState(status, reason="NVMLError: unknown"))
    assert "warn" == check.state
    assert check.do


class NvmlError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__("as the test asked")
        self.value = value


def pynvml(**answers: Any) -> ModuleType:
    """A binding that knows two devices, and answers or raises as told."""
    module = ModuleType("pynvml")
    codes = {
        "NVML_ERROR_LIBRARY_NOT_FOUND": 12,
        "NVML_ERROR_DRIVER_NOT_LOADED": 9,
        "NVML_ERROR_NO_PERMISSION": 4,
    }
    plain = {
        "nvmlInit": None,
        "nvmlShutdown": None,
        "nvmlSystemGetDriverVersion": b"580.1",
        "nvmlDeviceGetCount": 2,
        "nvmlDeviceGetHandleByIndex": 7,
        "nvmlDeviceGetName": "H200",
    }
    for name, value in {**plain, **answers}.items():

        def call(*_: object, value: Any = value) -> Any:
            if isinstance(value, Exception):
                raise value
            return value

        setattr(module, name, call)
    for name, code in codes.items():
        setattr(module, name, code)
    return module


def test_nvml_names_driver_and_devices_in_text_or_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_nvml_says_why_it_does_not_answer(
    code: int, driver: bool, status: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(nvml, "DRIVER_FILE", tmp_path if driver else tmp_path / "none")
    monkeypatch.setitem(sys.modules, "pynvml", pynvml(nvmlInit=NvmlError(code)))
    assert status == nvml.query_state().status


def test_nvml_never_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        sys.modules, "pynvml", pynvml(nvmlDeviceGetName=OSError("gone"), nvmlShutdown=OSError())
    )
    assert NvmlState("broken", reason="OSError: gone") == nvml.query_state()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert NvmlState("no package") == nvml.query_state()


# ── integrations ─────────────────────────────────────────────────────────────────────────────────────────────────


def seen(state: str = "active", **changes: Any) -> dict[str, Any]:
    """What the other process says of an integration."""
    plain = {
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
    return {**plain, **changes}


def part(name: str, state: str, drift: str | None = None, refused: str = "") -> dict[str, Any]:
    return {"name": name, "state": state, "drift": drift, "refused": refused}


def test_an_active_integration_says_its_version_and_how_many_hooks_are_bound() -> None:
    assert (
        "integration lib",
        "ok",
        "lib-dist 5.0: active, 3 of 4 hooks bound",
        "",
    ) == instrumentations.check_instrumentor(seen(), False)


def test_a_library_of_several_processes_says_what_binds_in_each() -> None:
    parts = [
        {**part("a", "active"), "where": "API server", "hooks_active": 2, "hooks_total": 2},
        {**part("b", "active"), "where": "engine core", "hooks_active": 1, "hooks_total": 2},
        {**part("c", "active"), "where": "engine core", "hooks_active": 3, "hooks_total": 3},
    ]
    found = instrumentations.check_instrumentor(seen(parts=parts), False).found
    assert found.endswith("3 of 4 hooks bound (API server 2 of 2, engine core 4 of 5)")


def test_a_library_that_is_told_to_load_other_plugins_only_is_a_warning() -> None:
    check = instrumentations.check_instrumentor(seen(unlisted="LIB_PLUGINS"), False)
    assert check.state == "warn" and "LIB_PLUGINS does not name otel_infer" in check.found
    assert "otel-infer run" in check.do


@pytest.mark.parametrize(
    ("plugins", "leaves_us_out"), [(None, False), ("", True), ("a,b", True), ("a,otel_infer", False)]
)
def test_a_list_of_plugins_leaves_us_out_or_not(plugins: str | None, leaves_us_out: bool) -> None:
    assert instrumentations._omits_otel_infer(plugins) is leaves_us_out


def test_a_part_that_waits_says_what_for() -> None:
    parts = [
        part("", "active"),
        part("serve", "waiting", refused="there is no module fastapi"),
        part("new", "absent"),
    ]
    found = instrumentations.check_instrumentor(seen(parts=parts), False).found
    assert found.endswith("bound; serve waits: there is no module fastapi; not here: new")


def test_drift_fails_and_says_what_is_lost_and_that_the_rest_is_not() -> None:
    parts = [part("generate", "active"), part("continuous batching", "drifted", "lib.a:B.c: there is no c")]
    check = instrumentations.check_instrumentor(seen("drifted", parts=parts), False)
    assert "fail" == check.state
    assert "lib.a:B.c: there is no c. continuous batching is not recorded; everything else is" in check.found
    assert "lib-dist" in check.do


def test_drift_of_everything_says_that_the_server_runs_on() -> None:
    check = instrumentations.check_instrumentor(
        seen("drifted", parts=[part("", "drifted", "lib:f: there is no f")]), False
    )
    assert check.found.endswith("lib is not recorded; the server runs on all the same")


def test_a_library_that_cannot_be_imported_is_to_be_repaired() -> None:
    check = instrumentations.check_instrumentor(
        seen("waiting", parts=[part("", "waiting", refused="ImportError: libx.so")]), False
    )
    assert ("warn", "lib-dist 5.0: cannot be imported: ImportError: libx.so") == check[1:3]
    assert f"{sys.executable} -c 'import lib'" in check.do


@pytest.mark.parametrize(
    ("state", "off", "found"),
    [("absent", False, "lib-dist is not installed"), ("active", True, "switched off by the configuration")],
)
def test_what_is_absent_or_switched_off_is_no_fault(state: str, off: bool, found: str) -> None:
    assert ("integration lib", "ok", found, "") == instrumentations.check_instrumentor(seen(state), off)


def test_without_any_engine_the_supported_ones_are_named_and_how_to_install_one() -> None:
    check = instrumentations.check_engine(
        [seen("absent"), seen("active", engine=False, distribution="other")]
    )
    assert "warn" == check.state
    assert "supported: lib-dist" in check.found
    assert sys.executable in check.found
    assert "pip install" in check.do
    assert "ok" == instrumentations.check_engine([seen("waiting")]).state


def test_an_import_that_never_ends_is_a_finding_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    late = probe_process.ProbeResult([seen(name="asgi", engine=False)], "took longer than 120 s")
    monkeypatch.setattr(probe_process, "run_in_subprocess", lambda *_: late)
    checks = instrumentations.check_instrumentations(Config(), imports=True)
    assert {"integration asgi": "ok", "integration threading": "fail"} == states(checks)
    assert checks[-1].found.endswith("took longer than 120 s")
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
def test_the_configuration_may_leave_an_integration_out(settings: Config, off: bool) -> None:
    assert off == instrumentations.is_disabled("lib", settings)


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Instrumentor]:
    """An integration of a library of two modules, of which one needs something that is not there."""
    (tmp_path / "doctored.py").write_text("def f(): ...\n")
    (tmp_path / "doctored_serving.py").write_text("import no_such_server\n")
    monkeypatch.syspath_prepend(tmp_path)
    one = Instrumentor("doctored", "doctored", ("doctored",), is_engine=True)
    one.patch_hot_path("doctored:f", part="generate")(lambda original, hook: original)
    one.patch_hot_path("doctored:g", part="steps")(lambda original, hook: original)
    one.patch_hot_path("doctored_serving:f", part="serve")(lambda original, hook: original)
    monkeypatch.setattr(registry, "load_instrumentors", lambda: [one])
    yield one
    one.remove()
    sys.modules.pop("doctored", None)


def test_a_library_is_imported_with_the_hooks_waiting_for_it(library: Instrumentor) -> None:
    (answer,) = instrumentations.run_probe({"excluded_urls": ""})
    parts = {each["name"]: (each["state"], each["refused"]) for each in answer["parts"]}
    assert ("drifted", 1) == (answer["state"], answer["hooks_active"])
    assert {"generate", "steps", "serve"} == set(parts)
    assert ("active", "") == parts["generate"]
    assert "drifted" == parts["steps"][0]
    assert ("waiting", "there is no module no_such_server") == parts["serve"]
    assert json.dumps(answer)


def test_without_imports_nothing_is_imported(library: Instrumentor) -> None:
    check, engine = instrumentations.check_instrumentations(Config(), imports=False)
    assert ("ok", "doctored: waiting, 0 of 3 hooks bound") == check[1:3]
    assert "ok" == engine.state
    assert "doctored" not in sys.modules


def test_an_import_that_ends_the_process_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "leaving.py").write_text("raise SystemExit('no licence\\nsecond line')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert "SystemExit: no licence" == instrumentations._find_import_error("leaving")
    assert "" == instrumentations._find_import_error("no_such_module.at_all")


# ── a process of its own ─────────────────────────────────────────────────────────────────────────────────────────


def test_another_process_that_breaks_says_its_last_line() -> None:
    found, trouble = probe_process.run_in_subprocess("no_such_check", {}, os.environ, 60.0)
    assert [] == found
    assert "ended with status 1: ModuleNotFoundError" in trouble


def test_another_process_that_takes_too_long_is_ended() -> None:
    assert (
        "took longer than 0 s"
        == probe_process.run_in_subprocess("instrumentations", {"excluded_urls": ""}, os.environ, 0.01).error
    )


def test_what_was_answered_before_the_end_counts() -> None:
    assert [{"a": 1}] == probe_process._parse_lines(b'{"a": 1}\n{"b": ')
    assert "was ended by signal 11" == probe_process._describe_failure(-11, b"")
    assert "ended with status 2: no reason given" == probe_process._describe_failure(2, b"")


# ── exporter ─────────────────────────────────────────────────────────────────────────────────────────────────────


def answer(accepted: int = 0, reason: str = "", log: str = "") -> dict[str, Any]:
    return {"accepted": accepted, "reason": reason, "log": log, "trace": "ab" * 16}


def test_an_accepted_span_can_be_looked_for() -> None:
    check = exporter.check_signal("spans", "http://c", answer(1))
    assert ("ok", f"http://c: accepted; look for trace {'ab' * 16}", "") == check[1:]


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
        ("name not resolved", "", "host name is not known", "correct the host"),
        ("TLS error", "", "TLS error", "OTEL_EXPORTER_OTLP_CERTIFICATE"),
        ("ProxyError", "", "the proxy refuses", "NO_PROXY"),
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
def test_what_a_destination_answers_is_named_with_what_to_do(
    reason: str, log: str, found: str, do: str
) -> None:
    check = exporter.check_signal("metrics", "http://c", answer(0, reason, log))
    assert "fail" == check.state
    assert found in check.found
    assert do in check.do


def test_a_warning_of_the_destination_is_passed_on() -> None:
    check = exporter.check_signal("spans", "http://c", answer(1, "partial success: slow down"))
    assert ("warn", "http://c: accepted, but with a warning: slow down") == check[1:3]


@pytest.mark.parametrize(
    ("error", "do"),
    [
        ("IncompatibleSdk", "tracer_provider"),
        ("ImportError", "pip install"),
        ("ValueError", "OTEL_EXPORTER_OTLP_"),
    ],
)
def test_an_exporter_that_cannot_be_used_fails(error: str, do: str) -> None:
    check = exporter.check_sdk_adapter({"error": error, "text": "what it says"}, "grpc")
    assert ("fail", f"{error}: what it says") == check[1:3]
    assert do in check.do


def test_nothing_is_sent_where_nothing_is_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    seam = {"what": "seam", "error": "", "text": ""}
    monkeypatch.setattr(probe_process, "run_in_subprocess", lambda *_: probe_process.ProbeResult([seam], ""))
    assert {"SDK seam": "ok", "exporter": "warn"} == states(exporter.check_exporter(Config(), {}))


def test_a_trial_that_broke_off_fails_each_signal_it_owes(monkeypatch: pytest.MonkeyPatch) -> None:
    seam = {"what": "seam", "error": "", "text": ""}
    monkeypatch.setattr(
        probe_process,
        "run_in_subprocess",
        lambda *_: probe_process.ProbeResult([seam], "took longer than 36 s"),
    )
    checks = exporter.check_exporter(Config(endpoint="http://c"), {ENDPOINT: "http://c"})
    assert {"SDK seam": "ok", "exporter spans": "fail", "exporter metrics": "fail"} == states(checks)
    monkeypatch.setattr(
        probe_process, "run_in_subprocess", lambda *_: probe_process.ProbeResult([], "was ended by signal 11")
    )
    assert {"SDK seam": "fail"} == states(exporter.check_exporter(Config(endpoint="http://c"), {}))


# ── shared memory ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def base() -> Iterator[Path]:
    """A folder of this test's own on tmpfs."""
    if not directory.is_tmpfs(Path("/dev/shm")):
        pytest.skip("/dev/shm is no tmpfs here")
    folder = directory.BASE / f"otel_infer-test-{os.getpid()}"
    folder.mkdir(mode=0o700)
    yield folder
    subprocess.run(["rm", "-r", str(folder)], check=True)


def rings(folder: Path, **changes: Any) -> Config:
    return Config(rings=str(folder), **changes)


def test_rings_of_full_size_fit_and_nothing_is_left_behind(base: Path) -> None:
    check, refused = shared_memory.check_shared_memory(rings(base))
    assert ("ok", "", "") == (check.state, check.do, refused)
    assert "mode: sidecar; rings fit at full size" in check.found
    assert [] == list(base.iterdir())


def test_a_folder_that_is_not_there_yet_is_not_there_afterwards(base: Path) -> None:
    check, _ = shared_memory.check_shared_memory(rings(base / "one" / "two"))
    assert "ok" == check.state
    assert [] == list(base.iterdir())


@pytest.mark.parametrize("mode", [0o1777, 0o755, 0o700])
def test_a_named_folder_keeps_its_mode_and_what_others_put_there(mode: int, base: Path) -> None:
    (base / "theirs.txt").touch()
    base.chmod(mode)
    assert "ok" == shared_memory.check_shared_memory(rings(base))[0].state
    assert "ok" == shared_memory.check_sidecar(rings(base), "").state
    assert mode == base.stat().st_mode & 0o7777
    assert ["theirs.txt"] == [path.name for path in base.rglob("*") if path.is_file()]


def test_a_relative_folder_is_found_by_the_sidecar_too(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(base)
    assert "ok" == shared_memory.check_sidecar(rings(Path("here")), "").state
    assert [] == list(base.iterdir())


def test_rings_that_had_to_shrink_ask_for_more_memory(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FileArena, "can_allocate", lambda self, size: size < 300_000)
    check, refused = shared_memory.check_shared_memory(rings(base))
    assert ("warn", "") == (check.state, refused)
    assert "only at 1/4 of their size" in check.found
    assert "--shm-size=256m" in check.do


@pytest.mark.parametrize(
    ("mode", "state", "sidecar", "says"),
    [
        ("auto", "warn", "warn", "mode: in-process"),
        ("sidecar", "fail", "fail", "mode: off"),
        ("in-process", "ok", "ok", "mode: in-process, since OTEL_INFER_MODE=in-process"),
    ],
)
def test_without_shared_memory_the_mode_decides_how_bad_that_is(
    mode: str, state: str, sidecar: str, says: str, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FileArena, "can_allocate", lambda self, size: False)
    settings = rings(base, mode=mode)
    check, refused = shared_memory.check_shared_memory(settings)
    assert state == check.state
    assert says in check.found
    assert (state != "ok") == ("--shm-size=256m" in check.do)
    assert sidecar == shared_memory.check_sidecar(settings, refused).state
    assert [] == list(base.iterdir())


def test_where_our_own_share_is_used_up_no_more_memory_is_asked_for(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FileArena, "remaining_bytes", lambda self: 0)
    check, _ = shared_memory.check_shared_memory(rings(base))
    assert "are used up" in check.found
    assert "another folder on tmpfs: OTEL_INFER_RINGS" in check.do
    assert "--shm-size" not in check.do


def test_a_disk_is_no_shared_memory(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "is_tmpfs", lambda folder: False)
    check, refused = shared_memory.check_shared_memory(rings(base))
    assert ("warn", f"{base} is not on tmpfs") == (check.state, refused)
    assert "unset OTEL_INFER_RINGS" in check.do
    assert [] == list(base.iterdir())


def test_a_users_folder_that_somebody_else_made_is_refused(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a folder away")
    monkeypatch.setattr(directory, "BASE", base)
    home = base / f"otel_infer-{os.getuid()}"
    home.mkdir()
    os.chown(home, 12345, -1)
    check, _ = shared_memory.check_shared_memory(Config())
    assert "warn" == check.state
    assert f"{home}: belongs to somebody else" in check.found


def test_a_frozen_interpreter_has_no_sidecar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    check = shared_memory.check_sidecar(Config(), "")
    assert ("ok", "not started: in-process, since the interpreter is frozen or embedded") == check[1:3]


# ── sidecar ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_real_sidecar_starts_reads_and_leaves(base: Path) -> None:
    check = shared_memory.check_sidecar(rings(base), "")
    assert ("ok", "") == (check.state, check.do), check.found
    assert [] == list(base.iterdir())


def test_a_sidecar_takes_over_nobodys_leftovers_while_it_is_tried(base: Path) -> None:
    dead = base / f"otel_infer-{os.getuid()}" / "1-dead"
    dead.mkdir(parents=True, mode=0o700)
    (dead / "1-a.requests").touch()
    assert "ok" == shared_memory.check_sidecar(rings(base), "").state
    assert ["1-a.requests"] == os.listdir(dead)


def test_a_sidecar_that_cannot_be_started_is_replaced_by_a_thread(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise launcher.SidecarStartError("Resource temporarily unavailable")

    monkeypatch.setattr(launcher, "start_sidecar", refuse)
    check = shared_memory.check_sidecar(rings(base), "")
    assert "warn" == check.state
    assert check.found.startswith("it cannot be started: Resource temporarily unavailable; mode: in-process")
    assert "OTEL_INFER_MODE=in-process" in check.do
    assert "fail" == shared_memory.check_sidecar(rings(base, mode="sidecar"), "").state
    assert [] == list(base.iterdir())


def started(code: str) -> Any:
    """In the place of the sidecar's start: a process that does something else."""
    return lambda *_, **__: subprocess.Popen([sys.executable, "-c", code])


def test_a_sidecar_that_ends_at_once_fails(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "start_sidecar", started("raise SystemExit(3)"))
    check = shared_memory.check_sidecar(rings(base), "")
    assert ("fail", "it ended at once, with status 3") == check[1:3]


def test_a_sidecar_that_breaks_says_why(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(folder: Path, settings: Config, *_: object) -> Any:
        Path(settings.log).write_text("Traceback\nValueError: what it says last\n")
        return started("raise SystemExit(1)")()

    monkeypatch.setattr(launcher, "start_sidecar", start)
    assert (
        "it ended at once, with status 1: ValueError: what it says last"
        == shared_memory.check_sidecar(rings(base), "").found
    )
    assert [] == list(base.iterdir())


def test_a_sidecar_that_does_nothing_is_ended(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    children: list[Any] = []
    start = started("import time; time.sleep(60)")
    monkeypatch.setattr(launcher, "start_sidecar", lambda *_, **__: children.append(start()) or children[0])
    monkeypatch.setattr(shared_memory, "START_S", 0.2)
    assert "it did not take its lock within 0 s" == shared_memory.check_sidecar(rings(base), "").found
    assert children[0].returncode is not None


def test_a_folder_that_has_a_sidecar_is_not_given_another(base: Path) -> None:
    code = (
        "import sys, pathlib; from otel_infer.ringbuffer import directory as place; "
        "lock = place.FileLock(pathlib.Path(sys.argv[1])); print(lock.acquire(), flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(base / directory.SIDECAR_LOCK)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert "True\n" == holder.stdout.readline()
        assert ("ok", f"one reads {base} already") == shared_memory.check_sidecar(rings(base), "")[1:3]
        holder.communicate()


# ── leftovers ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_rings_of_dead_servers_are_found_and_left_alone(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "BASE", base)
    assert "ok" == shared_memory.check_leftovers(Config()).state
    dead = directory.create_server_folder(base)
    arena = FileArena(dead)
    RequestWriter(arena, "1-a", "server")
    arena.close()
    before = [(path, path.stat().st_mtime_ns) for path in (dead, *sorted(dead.iterdir()))]
    check = shared_memory.check_leftovers(Config())
    assert "warn" == check.state
    assert "rings of 1 dead server (" in check.found
    assert str(dead) in check.do
    assert before == [(path, path.stat().st_mtime_ns) for path in (dead, *sorted(dead.iterdir()))]


def test_rings_of_a_dead_server_in_a_named_folder_are_found(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "BASE", base / "none")
    assert "ok" == shared_memory.check_leftovers(rings(base)).state
    arena = FileArena(base)
    RequestWriter(arena, "1-a", "server")
    arena.close()
    (base / "theirs.txt").touch()
    check = shared_memory.check_leftovers(rings(base))
    assert ("warn", True) == (check.state, str(base) in check.do)


def test_a_living_server_is_no_leftover(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "BASE", base)
    monkeypatch.setattr(directory, "is_held", lambda path: path.suffix == ".requests")
    folder = directory.create_server_folder(base)
    (folder / "1-a.requests").touch()
    assert "ok" == shared_memory.check_leftovers(Config()).state


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────

FINE = Check("versions", "ok", "all there")
WARNED = Check("engine", "warn", "none [bold]", "install one")
FAILED = Check("exporter", "fail", "http://me:canary@h: refused", "start it")


def doctored(monkeypatch: pytest.MonkeyPatch, *checks: Check, **options: Any) -> int:
    """The exit status of a doctor that finds these."""
    monkeypatch.setattr(doctor, "iter_checks", lambda *_: [("all", lambda: list(checks))])
    return doctor.run(argparse.Namespace(**{"json": False, "imports": False, **options}))


def test_only_a_failure_ends_with_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 == doctored(monkeypatch, FINE, WARNED)
    assert 1 == doctored(monkeypatch, FINE, FAILED, WARNED)


def test_piped_it_is_aligned_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    doctored(monkeypatch, FINE, WARNED)
    assert [
        "ok    versions                  all there",
        "warn  engine                    none [bold]",
        "                                do: install one",
        "1 ok, 1 to look at, 0 failed",
    ] == capsys.readouterr().out.splitlines()


def test_as_json_it_is_one_object(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    doctored(monkeypatch, FINE, FAILED, json=True)
    expected = [FINE._asdict(), {**FAILED._asdict(), "found": "http://***@h: refused"}]
    assert {"checks": expected, "ok": False} == json.loads(capsys.readouterr().out)


def test_on_a_terminal_it_is_wrapped_and_brackets_are_no_markup(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    doctored(monkeypatch, WARNED, FINE._replace(found="word " * 30))
    lines = capsys.readouterr().out.splitlines()
    assert any("none [bold]" in line for line in lines)
    assert any("→ install one" in line for line in lines)
    assert sum("word" in line for line in lines) > 3


def test_a_check_that_breaks_is_a_finding() -> None:
    def broken() -> list[Check]:
        raise RingUnavailable("unforeseen")

    (check,) = doctor.run_check("leftovers", broken)
    assert ("leftovers", "fail", "this check broke: RingUnavailable: unforeseen") == check[:3]


def test_every_finding_that_is_not_fine_says_what_to_do(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "BASE", base)
    monkeypatch.setattr(FileArena, "can_allocate", lambda self, size: False)
    environ = {"OTEL_INFER_STEPS": "?", "PATH": os.environ["PATH"]}
    checks = [
        check for about, look in doctor.iter_checks(environ, False) for check in doctor.run_check(about, look)
    ]
    assert {"shared memory", "sidecar", "configuration", "exporter"} <= {
        c.name for c in checks if c.state != "ok"
    }
    assert [] == [check for check in checks if (check.state == "ok") == bool(check.do)]


def test_the_options_are_as_documented() -> None:
    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    assert {"json": False, "imports": True} == vars(parser.parse_args([]))
    assert {"json": True, "imports": False} == vars(parser.parse_args(["--json", "--no-imports"]))


def test_what_lies_where_it_is_called_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit(7)")
    monkeypatch.chdir(tmp_path)
    told = {"excluded_urls": "", "imports": False}
    assert probe_process.run_in_subprocess("instrumentations", told, os.environ, 60.0).error == ""
