"""NVML readings from a stub libnvidia-ml: metric, unit and device of each, and that a failed reading is absent, never 0."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from otel_infer import semconv

STUB = Path(__file__).parents[2] / "support" / "nvml_stub.c"
CODES = {"not supported": 3, "no permission": 4, "unknown": 999, "lost": 15}
METRICS = {
    "utilization": "hw.gpu.utilization",
    "memory": "hw.gpu.memory.usage",
    "power": "hw.power",
    "energy": "hw.energy",
    "temperature": "hw.temperature",
    "throttled": "infer.gpu.throttled",
    "errors": "hw.errors",
    "activity": "infer.gpu.activity",
}
READ_SCRIPT = """
import json, os, sys
from otel_infer.gpu.nvml_poller import NvmlReader
from otel_infer.export.metrics import gpus
reader = NvmlReader(os.environ.get("CUDA_VISIBLE_DEVICES"))
result = {"open": reader.open()}
for _ in range(4):
    values = []
    gpus.set_gpu_metrics(reader.read_all() if result["open"] else [], reader.driver, lambda m, a, v: values.append((m.name, a, v)))
result["values"], result["unsupported"] = values, sorted(reader.unsupported)
reader.close()
print(json.dumps(result))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the stub libnvidia-ml.so.1 and returns its folder."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("nvml")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / "libnvidia-ml.so.1", STUB], check=True)
    return folder


def read_gpus(library: Path | None, failing: str = "", visible: str | None = None) -> dict[str, Any]:
    environ = {**os.environ, "NVML_STUB": failing}
    environ.pop("CUDA_VISIBLE_DEVICES", None)
    environ |= {"LD_LIBRARY_PATH": str(library)} if library else {}
    environ |= {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    done = subprocess.run(
        [sys.executable, "-c", READ_SCRIPT], env=environ, capture_output=True, text=True, check=True
    )
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def values(result: dict[str, Any], metric: str, key: str = "") -> dict[tuple[Any, ...], float]:
    """Returns the values of a metric by device id, and by the attribute `key`."""
    return {
        (attributes["hw.id"], *([attributes[key]] if key else [])): value
        for name, attributes, value in result["values"]
        if name == metric
    }


def test_readings_are_exported_by_metric_unit_and_device(library: Path) -> None:
    result = read_gpus(library)
    assert values(result, "hw.gpu.utilization", "hw.gpu.task") == {("GPU-0", "general"): 0.75}
    assert values(result, "hw.gpu.memory.usage") == {("GPU-0",): 20000, ("GPU-1",): 10000, ("MIG-2",): 5000}
    assert values(result, "hw.gpu.memory.limit") == {("GPU-0",): 80000, ("GPU-1",): 40000, ("MIG-2",): 20000}
    assert set(values(result, "hw.gpu.memory.utilization").values()) == {0.25}
    assert values(result, "hw.power") == {("GPU-0",): 300.5, ("GPU-1",): 300.5}
    assert values(result, "hw.energy") == {("GPU-0",): 7.5, ("GPU-1",): 7.5}
    assert values(result, "hw.temperature") == {("GPU-0",): 61, ("GPU-1",): 61}
    assert values(result, "hw.errors", "error.type")["GPU-0", "corrected"] == 12
    throttled = values(result, "infer.gpu.throttled", "infer.gpu.throttle.reason")
    assert {reason for (uuid, reason), value in throttled.items() if value and uuid == "GPU-0"} == {
        "power_cap", "hw_thermal",
    }  # fmt: skip
    # DRAM is not supported, so it is absent.
    assert values(result, "infer.gpu.activity", "infer.gpu.unit") == {
        ("GPU-0", "sm"): 0.2,
        ("GPU-0", "tensor"): 0.5,
    }


def test_critical_xids_are_counted_by_number(library: Path) -> None:
    counts = [
        value
        for name, attributes, value in read_gpus(library)["values"]
        if attributes.get("error.type") == "xid_79"
    ]
    assert counts == [1]  # the last of four readings
    result = read_gpus(library, "xids=3")
    assert ["GPU-0", "xids"] in result["unsupported"]
    assert not [
        attributes
        for _, attributes, _ in result["values"]
        if str(attributes.get("error.type")).startswith("xid")
    ]
    assert values(result, "hw.errors", "error.type")["GPU-0", "corrected"] == 12


def test_every_metric_and_attribute_is_in_semconv(library: Path) -> None:
    known = {metric.name: set(metric.attributes) for metric in semconv.METRICS}
    for name, attributes, _ in read_gpus(library)["values"]:
        assert set(attributes) <= known[name]


def test_mig_device_names_its_parent(library: Path) -> None:
    (attributes,) = [
        attributes
        for name, attributes, _ in read_gpus(library)["values"]
        if name == "hw.gpu.memory.usage" and attributes["hw.id"] == "MIG-2"
    ]
    assert attributes["hw.parent"] == "GPU-1"
    assert attributes["hw.model"] == "Stub 1 MIG"


@pytest.mark.parametrize("code", CODES, ids=str)
@pytest.mark.parametrize("reading", METRICS)
def test_failed_reading_is_absent_and_others_are_exported(library: Path, reading: str, code: str) -> None:
    """A reading is not repeated if it is unsupported or not permitted."""
    result = read_gpus(library, f"{reading}={CODES[code]}")
    remaining = [attributes for name, attributes, _ in result["values"] if name == METRICS[reading]]
    assert [
        attributes for attributes in remaining if not str(attributes.get("error.type")).startswith("xid")
    ] == []
    assert (["GPU-0", reading] in result["unsupported"]) == (code in ("not supported", "no permission"))
    other_metrics = set(METRICS.values()) - {METRICS[reading]}
    assert other_metrics <= {name for name, _, _ in result["values"]}


DETECT = """
import json
from otel_infer.gpu.resource_detector import GpuResourceDetector
print(json.dumps({name: value for name, value in GpuResourceDetector().detect().attributes.items()}))
"""


def test_resource_lists_the_gpus(library: Path) -> None:
    for failing, expected in (
        (
            "",
            {
                "infer.gpu.count": 2,
                "infer.gpu.models": ["Stub 0", "Stub 1"],
                "infer.gpu.driver_version": "580.1",
            },
        ),
        ("init=9", {}),
    ):
        environ = {**os.environ, "LD_LIBRARY_PATH": str(library), "NVML_STUB": failing}
        done = subprocess.run(
            [sys.executable, "-c", DETECT], env=environ, capture_output=True, text=True, check=True
        )
        assert json.loads(done.stdout) == expected


@pytest.mark.parametrize("code", [9, 12, 4], ids=["driver not loaded", "library not found", "no permission"])
def test_without_a_driver_nothing_is_exported(library: Path, code: int) -> None:
    assert read_gpus(library, f"init={code}") == {"open": False, "values": [], "unsupported": []}


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("0", {"GPU-0"}),
        ("1", {"GPU-1", "MIG-2"}),
        ("GPU-0", {"GPU-0"}),
        ("MIG-2", {"MIG-2"}),
        ("1,0", {"GPU-0", "GPU-1", "MIG-2"}),
        ("", set()),
        ("-1", set()),
    ],
)
def test_only_visible_devices_are_read(library: Path, visible: str, expected: set[str]) -> None:
    result = read_gpus(library, visible=visible)
    assert {attributes["hw.id"] for _, attributes, _ in result["values"]} == expected
    assert result["open"] is bool(expected)
