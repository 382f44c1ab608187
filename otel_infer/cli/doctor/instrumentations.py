"""Checks which integrations bind.

Engines are imported in a separate process, with our import hooks in place.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from otel_infer.cli.doctor import probe_process
from otel_infer.cli.doctor.check import Check
from otel_infer.config import environment
from otel_infer.config.environment import Config
from otel_infer.instrumentation import registry, unseen_libraries
from otel_infer.instrumentation.hooks.instrumentor import Instrumentor

PROBE_TIMEOUT_S = 120.0


def check_instrumentations(settings: Config, imports: bool) -> list[Check]:
    """Returns one check per integration, and one on whether any engine is installed."""
    if imports:
        environ = environment.child_environment(enabled="off")
        statuses, error = probe_process.run_in_subprocess(
            "instrumentations", {"excluded_urls": settings.excluded_urls}, environ, PROBE_TIMEOUT_S
        )
    else:
        statuses, error = list(run_probe({"excluded_urls": settings.excluded_urls, "imports": False})), ""
    checks = [check_instrumentor(status, is_disabled(status["name"], settings)) for status in statuses]
    checks.append(_report_aborted_import(len(statuses), error) if error else check_engine(statuses))
    return [*checks, *check_unseen_libraries()]


def check_unseen_libraries() -> list[Check]:
    """Returns one check that names the installed libraries which no integration follows; none if there is none."""
    libraries = unseen_libraries.find_installed()
    if not libraries:
        return []
    found = "; ".join(f"{library.module}: {library.effect}" for library in libraries)
    return [Check("not followed", "ok", f"{found} (only if your server uses it)")]


def is_disabled(name: str, settings: Config) -> bool:
    """Returns whether the configuration disables this integration."""
    listed = not settings.integrations or name in settings.integrations
    return not listed or bool({name, f"otel_infer_{name}"} & set(settings.disabled_integrations))


# ── in the child process ─────────────────────────────────────────────────────────────────────────────────────────


def run_probe(options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the state of each integration and its hooks, as JSON.

    Its library is imported first, unless the option `imports` is false.
    """
    registry.configure_instrumentors(Config(excluded_urls=options["excluded_urls"]), lambda integration: None)
    for integration in registry.load_instrumentors():
        import_errors: dict[str, str] = {}
        if options.get("imports", True) and integration.status.state != "absent":
            integration.install()
            import_errors = {
                name: error for name in _hooked_modules(integration) if (error := _find_import_error(name))
            }
        yield {
            **integration.status.__dict__,
            "engine": integration.is_engine,
            "parts": _describe_parts(integration, import_errors),
            "unlisted": integration.plugins if _omits_otel_infer(os.environ.get(integration.plugins)) else "",
        }


def _omits_otel_infer(plugins: str | None) -> bool:
    """Returns whether a list of plugins omits otel_infer. None means no list: all plugins are loaded."""
    return plugins is not None and "otel_infer" not in plugins.split(",")


def _hooked_modules(integration: Instrumentor) -> list[str]:
    """Returns the modules that an integration hooks, without duplicates and in its order.

    For an integration without hooks: the modules whose import it awaits.
    """
    hooked = [module for part in integration.describe_parts() for module in part.modules]
    return list(dict.fromkeys(hooked or integration.modules))


def _find_import_error(name: str) -> str:
    """Returns why a module cannot be imported; empty if it can, or if this release has no such module."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as missing:
        is_absent = missing.name and (name == missing.name or name.startswith(f"{missing.name}."))
        return "" if is_absent else f"there is no module {missing.name}"
    except BaseException as error:  # an import may raise anything, SystemExit included
        lines = str(error).strip().splitlines()
        return (
            f"{type(error).__name__}: {lines[0][: probe_process.MAX_REASON_CHARS] if lines else ''}".rstrip(
                ": "
            )
        )
    return ""


def _describe_parts(integration: Instrumentor, import_errors: Mapping[str, str]) -> list[dict[str, Any]]:
    parts = []
    for part in integration.describe_parts():
        error = next((import_errors[module] for module in part.modules if module in import_errors), "")
        parts.append(
            {
                "name": part.name,
                "state": part.state,
                "drift": part.drift,
                "refused": error,
                "where": integration.where.get(part.name, ""),
                "hooks_active": part.hooks_active,
                "hooks_total": part.hooks_total,
            }
        )
    return parts


# ── as checks ────────────────────────────────────────────────────────────────────────────────────────────────────


def check_instrumentor(status: Mapping[str, Any], disabled: bool) -> Check:
    """Returns the check of one integration."""
    name = f"integration {status['name']}"
    if disabled:
        return Check(name, "ok", "switched off by the configuration")
    if status["state"] == "absent":
        return Check(name, "ok", f"{status['distribution']} is not installed")
    library = f"{status['distribution']} {status['version']}" if status["version"] else status["distribution"]
    bound = f"{status['hooks_active']} of {status['hooks_total']} hooks bound"
    if status["state"] == "drifted":
        found = f"{library}: mismatch, {bound}{_hooks_by_process(status)}; {_describe_drift(status)}"
        return Check(name, "fail", found, _drift_remedy(status))
    import_errors = sorted({part["refused"] for part in status["parts"] if part["refused"]})
    if status["state"] == "waiting" and import_errors:
        do = f"run `{sys.executable} -c 'import {status['name']}'`: it fails without otel_infer, too"
        return Check(name, "warn", f"{library}: cannot be imported: {'; '.join(import_errors)}", do)
    if status.get("unlisted"):
        do = f"name otel_infer in {status['unlisted']}, or start your server with `otel-infer run -- …`"
        found = f"{library}: {bound}, but {status['unlisted']} does not name otel_infer, so {status['name']} does not load it"
        return Check(name, "warn", found, do)
    if not status["hooks_total"]:
        return Check(name, "ok", f"{library}: nothing to hook")
    return Check(
        name,
        "ok",
        f"{library}: {status['state']}, {bound}{_hooks_by_process(status)}{_describe_unbound(status)}",
    )


def check_engine(statuses: list[dict[str, Any]]) -> Check:
    """Checks whether a supported engine is installed."""
    supported = [status["distribution"] for status in statuses if _is_engine(status)]
    present = [
        status["distribution"] for status in statuses if _is_engine(status) and status["state"] != "absent"
    ]
    if present:
        return Check("engine", "ok", ", ".join(present))
    found = f"none is installed for {sys.executable}; supported: {', '.join(supported)}"
    do = f"run {sys.executable} -m pip install 'transformers[serving]' torch, or run `otel-infer doctor` with the "
    return Check("engine", "warn", found, f"{do}Python that runs your server")


def _is_engine(status: Mapping[str, Any]) -> bool:
    return bool(status["engine"])


def _describe_drift(status: Mapping[str, Any]) -> str:
    """Returns the mismatches, and which parts are therefore not recorded."""
    mismatched = [part for part in status["parts"] if part["state"] == "drifted"]
    reasons = "; ".join(str(part["drift"]) for part in mismatched)
    parts = " and ".join(part["name"] or status["name"] for part in mismatched)
    any_recorded = any(part["state"] in ("active", "waiting") for part in status["parts"])
    verb = "are" if len(mismatched) > 1 else "is"
    return f"{reasons}. {parts} {verb} not recorded; {'everything else is' if any_recorded else 'the server still runs'}"


def _hooks_by_process(status: Mapping[str, Any]) -> str:
    """Returns the bound and total hooks per process role; empty if the library has one process."""
    counts: dict[str, tuple[int, int]] = {}
    for part in status["parts"]:
        if part.get("where"):
            active, total = counts.get(part["where"], (0, 0))
            counts[part["where"]] = active + part["hooks_active"], total + part["hooks_total"]
    text = ", ".join(f"{where} {active} of {total}" for where, (active, total) in counts.items())
    return f" ({text})" if text else ""


def _drift_remedy(status: Mapping[str, Any]) -> str:
    library = status["distribution"]
    return f"{sys.executable} -m pip install -U otel-infer; if it still fails, install another release of {library}"


def _describe_unbound(status: Mapping[str, Any]) -> str:
    """Returns the unbound parts: waiting parts with the reason, and absent parts."""
    waiting = [part for part in status["parts"] if part["state"] == "waiting" and status["state"] == "active"]
    notes = [
        f"{part['name'] or status['name']} waits{': ' * bool(part['refused'])}{part['refused']}"
        for part in waiting
    ]
    absent = [part["name"] for part in status["parts"] if part["state"] == "absent"]
    notes += [f"absent: {', '.join(absent)}"] if absent else []
    return "".join(f"; {note}" for note in notes)


def _report_aborted_import(checked: int, error: str) -> Check:
    names = list(registry.BUILTIN)
    name = names[checked] if checked < len(names) else "of another distribution"
    do = f"run `{sys.executable} -c 'import {name}'`: if that fails too, repair {name}; else use --no-imports"
    return Check(f"integration {name}", "fail", f"importing its library {error}", do)
