"""Which GPUs there are, for the resource of any OpenTelemetry SDK: `OTEL_EXPERIMENTAL_RESOURCE_DETECTORS=otel_infer_gpu,otel`.

There is no convention for GPUs on a resource (`hw.*` are attributes of metrics), so the names are ours.
"""

from __future__ import annotations

from opentelemetry.sdk.resources import Resource, ResourceDetector

from otel_infer import semconv
from otel_infer.gpu import nvml


class GpuResourceDetector(ResourceDetector):
    """Count, models and driver, by NVML; nothing where there is none."""

    def detect(self) -> Resource:
        """Asks once; never raises."""
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
