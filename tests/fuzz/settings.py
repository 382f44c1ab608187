"""Environment variables with any text: a server continues, a command gets an error that it can print."""

from __future__ import annotations

import random

from otel_infer.config import environment, standard_variables
from otel_infer.config.settings import SETTINGS, InvalidSetting
from tests.fuzz.odd_values import NUMBERS, TEXTS

NAMES = [
    *(setting.variable for setting in SETTINGS.values()),
    *standard_variables.PARSERS,
    "OTEL_TRACES_SAMPLER",
    "OTEL_TRACES_SAMPLER_ARG",
    "OTEL_TRACES_EXPORTER",
    "OTEL_METRICS_EXPORTER",
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_SERVICE_NAME",
    "OTEL_RESOURCE_ATTRIBUTES",
    "OTEL_PYTHON_DISABLED_INSTRUMENTATIONS",
    "OTEL_PYTHON_EXCLUDED_URLS",
]
WORDS = (
    "on", "off", "auto", "all", "ttft=1s", "itl=200ms", "header:X-Tenant", "baggage:a", "lora", "route:/v1=batch",
    "cpu=25%", "memory=256MiB", "http://a:4318", "grpc://a:4317", "localhost:4318", "traceidratio", "otlp", "none",
    "9464", "0.0.0.0:9464", ":", ";", "model:x", "=", "%", "5", "100", "service.name=a,b=c", "{", "(", "[a-",
)  # fmt: skip


def run_once(draw: random.Random) -> int:
    """Reads one random environment both ways. Returns 1."""
    environ = {name: _draw_text(draw) for name in draw.sample(NAMES, draw.randint(1, 8))}
    settings, messages = environment.from_env_or_defaults(environ)
    environment.from_json_dict(environment.to_json_dict(settings))
    if not all(isinstance(message, str) and message for message in messages):
        raise AssertionError("an empty message")
    try:
        environment.from_env(environ)
    except InvalidSetting as error:
        if not str(error):
            raise AssertionError("an empty error") from None
    return 1


def _draw_text(draw: random.Random) -> str:
    kind = draw.randrange(4)
    if kind == 0:
        return draw.choice(TEXTS).replace("\x00", "")
    if kind == 1:
        return str(draw.choice(NUMBERS))
    return draw.choice((",", ";", " ", "=", "")).join(draw.choices(WORDS, k=draw.randint(1, 4)))
