"""Loads OpenTelemetry's API where OTEL_PROPAGATORS names a propagator that is not installed.

`opentelemetry.propagate` raises at its import then (API 1.27 to 1.45), so every import of it would end the
server. The packages that import it call `load_api` first.
"""

from __future__ import annotations

import os
from importlib import import_module
from importlib.metadata import entry_points

VARIABLE = "OTEL_PROPAGATORS"
_PACKAGES = {
    "b3": "opentelemetry-propagator-b3",
    "b3multi": "opentelemetry-propagator-b3",
    "jaeger": "opentelemetry-propagator-jaeger",
    "ottrace": "opentelemetry-propagator-ot-trace",
    "xray": "opentelemetry-propagator-aws-xray",
    "xray-lambda": "opentelemetry-propagator-aws-xray",
}
"""The distribution of each propagator that the specification names."""
_DEFAULT = "tracecontext,baggage"
_load_state = {"failed": False}


def load_api() -> None:
    """Imports `opentelemetry.propagate`, without the propagators that cannot be loaded."""
    try:
        import_module("opentelemetry.propagate")
    except Exception:
        configured = os.environ.get(VARIABLE)
        if configured is None:
            raise
        _load_state["failed"] = True
        usable = [name for name in _configured_names() if not _find_load_error(name)]
        os.environ[VARIABLE] = ",".join(usable) or _DEFAULT
        try:
            import_module("opentelemetry.propagate")
        finally:
            os.environ[VARIABLE] = configured


def describe_unusable() -> str:
    """Returns one sentence on the propagators that could not be loaded; empty if all could."""
    if not _load_state["failed"]:
        return ""
    errors = {name: error for name in _configured_names() if (error := _find_load_error(name))}
    usable = ",".join(name for name in _configured_names() if name not in errors) or _DEFAULT
    problems = "; ".join(f"{name!r} {error}" for name, error in errors.items())
    return f"{VARIABLE}={os.environ[VARIABLE]!r}: {problems}; using {usable}"


def _configured_names() -> list[str]:
    names = [name.strip() for name in os.environ.get(VARIABLE, "").split(",")]
    return names if any(names) and "none" not in (name.lower() for name in names) else []


def _find_load_error(name: str) -> str:
    """Returns why a propagator cannot be loaded, as the end of a sentence; empty if it can."""
    found = list(entry_points(group="opentelemetry_propagator", name=name))
    if not found:
        package = _PACKAGES.get(name)
        return f"is not installed (pip install {package})" if package else "is misspelled or not installed"
    try:
        found[0].load()()
    except Exception as error:
        return f"cannot be loaded ({type(error).__name__})"
    return ""
