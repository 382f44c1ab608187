"""The SDK's sampler and limits, as the standard variables configure them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from otel_infer.config.environment import Config, hide_refused_values
from otel_infer.tracing import span_ids

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.sampling import Sampler
    from opentelemetry.trace import TracerProvider


def create_span_factory(provider: TracerProvider | None, settings: Config) -> span_ids.SpanFactory:
    """Returns what makes the ids of a request's span: the given provider, or the configured sampler."""
    if provider is not None:
        return span_ids.ProviderSpanFactory(provider.get_tracer("otel_infer"))
    with hide_refused_values():  # the SDK reads its limits at its import, and raises
        from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

        sampler = _create_sampler(settings)
    limits = span_ids.Limits(
        settings.attribute_limit, settings.event_limit, settings.link_limit, settings.attribute_length_limit
    )
    return span_ids.SdkSpanFactory(sampler, RandomIdGenerator(), limits)


def _create_sampler(settings: Config) -> Sampler:
    """Returns the sampler that the standard variables configure."""
    from opentelemetry.sdk.trace import sampling

    rate = float(settings.sampler_argument or 1.0) if settings.ratio_sampling else 1.0
    samplers: dict[str, Sampler] = {
        "always_on": sampling.ALWAYS_ON,
        "always_off": sampling.ALWAYS_OFF,
        "traceidratio": sampling.TraceIdRatioBased(rate),
        "parentbased_always_on": sampling.DEFAULT_ON,
        "parentbased_always_off": sampling.DEFAULT_OFF,
        "parentbased_traceidratio": sampling.ParentBasedTraceIdRatio(rate),
    }
    return samplers[settings.sampler]
