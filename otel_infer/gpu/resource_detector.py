"""A resource detector for GPUs, for any OpenTelemetry SDK.

It is enabled by `OTEL_EXPERIMENTAL_RESOURCE_DETECTORS=otel_infer_gpu,otel`. No convention covers GPUs on a
resource (`hw.*` are attributes of metrics), so the names are this package's.
"""

from __future__ import annotations

from opentelemetry.sdk.resources import Resource, ResourceDetector

from otel_infer import semconv
from otel_infer.gpu import nvml


class GpuResourceDetector(ResourceDetector):
    """Detects count, models and driver version of the GPUs by NVML."""

    def detect(self) -> Resource:
        """Returns the GPUs as a resource, empty where there are none; never raises."""
        state = nvml.query_state()
        if state.status != "ready" or not state.devices:
            return Resource.get_empty()
        return Resource(
            {
                semconv.GPU_COUNT: len(state.devices),
                semconv.GPU_MODELS: sorted(set(state.devices)),
                semconv.GPU_DRIVER: state.driver,
            }
        )
