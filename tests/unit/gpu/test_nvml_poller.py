"""The state of GPUs by a libnvidia-ml of our own: what is read of whom, under which name, and that what fails is never 0."""

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
ASK = """
import json, os, sys
from otel_infer.gpu.nvml_poller import NvmlReader
from otel_infer.export.metrics import gpus
readings = NvmlReader(os.environ.get("CUDA_VISIBLE_DEVICES"))
said = {"open": readings.open()}
for _ in range(4):
    values = []
    gpus.set_gpu_metrics(readings.read_all() if said["open"] else [], readings.driver, lambda m, a, v: values.append((m.name, a, v)))
said["values"], said["unsupported"] = values, sorted(readings.unsupported)
readings.close()
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a libnvidia-ml.so.1."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    folder = tmp_path_factory.mktemp("nvml")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / "libnvidia-ml.so.1", STUB], check=True)
    return folder


def asked(library: Path | None, failing: str = "", visible: str | None = None) -> dict[str, Any]:
    environ = {**os.environ, "NVML_STUB": failing}
    environ.pop("CUDA_VISIBLE_DEVICES", None)
    environ |= {"LD_LIBRARY_PATH": str(library)} if library else {}
    environ |= {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    done = subprocess.run(
        [sys.executable, "-c", ASK], env=environ, capture_output=True, text=True, check=True
    )
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def values(said: dict[str, Any], metric: str, key: str = "") -> dict[tuple[Any, ...], float]:
    """By device, and by one more attribute."""
    return {
        (of["hw.id"], *([of[key]] if key else [])): value
        for name, of, value in said["values"]
        if name == metric
    }


def test_every_value_has_its_name_its_unit_and_its_device(library: Path) -> None:
    said = asked(library)
    assert values(said, "hw.gpu.utilization", "hw.gpu.task") == {("GPU-0", "general"): 0.75}
    assert values(said, "hw.gpu.memory.usage") == {("GPU-0",): 20000, ("GPU-1",): 10000, ("MIG-2",): 5000}
    assert values(said, "hw.gpu.memory.limit") == {("GPU-0",): 80000, ("GPU-1",): 40000, ("MIG-2",): 20000}
    assert set(values(said, "hw.gpu.memory.utilization").values()) == {0.25}
    assert values(said, "hw.power") == {("GPU-0",): 300.5, ("GPU-1",): 300.5}
    assert values(said, "hw.energy") == {("GPU-0",): 7.5, ("GPU-1",): 7.5}
    assert values(said, "hw.temperature") == {("GPU-0",): 61, ("GPU-1",): 61}
    assert values(said, "hw.errors", "error.type")["GPU-0", "corrected"] == 12
    throttled = values(said, "infer.gpu.throttled", "infer.gpu.throttle.reason")
    assert {reason for (uuid, reason), value in throttled.items() if value and uuid == "GPU-0"} == {
        "power_cap", "hw_thermal",
    }  # fmt: skip
    # DRAM is not supported, and so there is none.
    assert values(said, "infer.gpu.activity", "infer.gpu.unit") == {
        ("GPU-0", "sm"): 0.2,
        ("GPU-0", "tensor"): 0.5,
    }


def test_what_the_driver_called_critical_is_counted_by_its_number(library: Path) -> None:
    counts = [value for name, of, value in asked(library)["values"] if of.get("error.type") == "xid_79"]
    assert counts == [1]  # of the last of four readings
    said = asked(library, "xids=3")
    assert ["GPU-0", "xids"] in said["unsupported"]
    assert not [of for _, of, _ in said["values"] if str(of.get("error.type")).startswith("xid")]
    assert values(said, "hw.errors", "error.type")["GPU-0", "corrected"] == 12


def test_every_name_and_attribute_is_in_the_table(library: Path) -> None:
    known = {metric.name: set(metric.attributes) for metric in semconv.METRICS}
    for name, attributes, _ in asked(library)["values"]:
        assert set(attributes) <= known[name]


def test_a_mig_device_says_whose_it_is(library: Path) -> None:
    (of,) = [
        of
        for name, of, _ in asked(library)["values"]
        if name == "hw.gpu.memory.usage" and of["hw.id"] == "MIG-2"
    ]
    assert of["hw.parent"] == "GPU-1"
    assert of["hw.model"] == "Stub 1 MIG"


@pytest.mark.parametrize("code", CODES, ids=str)
@pytest.mark.parametrize("what", METRICS)
def test_what_fails_is_absent_and_the_rest_is_there_and_only_what_is_not_to_be_had_is_not_asked_again(
    library: Path, what: str, code: str
) -> None:
    said = asked(library, f"{what}={CODES[code]}")
    still = [of for name, of, _ in said["values"] if name == METRICS[what]]
    assert [of for of in still if not str(of.get("error.type")).startswith("xid")] == []
    assert (["GPU-0", what] in said["unsupported"]) == (code in ("not supported", "no permission"))
    others = set(METRICS.values()) - {METRICS[what]}
    assert others <= {name for name, _, _ in said["values"]}


DETECT = """
import json
from otel_infer.gpu.resource_detector import GpuResourceDetector
print(json.dumps({name: value for name, value in GpuResourceDetector().detect().attributes.items()}))
"""


def test_a_resource_says_which_gpus_there_are(library: Path) -> None:
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
def test_without_a_driver_nothing_is_said(library: Path, code: int) -> None:
    assert asked(library, f"init={code}") == {"open": False, "values": [], "unsupported": []}


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
def test_only_what_the_server_may_use_is_read(library: Path, visible: str, expected: set[str]) -> None:
    said = asked(library, visible=visible)
    assert {of["hw.id"] for _, of, _ in said["values"]} == expected
    assert said["open"] is bool(expected)
