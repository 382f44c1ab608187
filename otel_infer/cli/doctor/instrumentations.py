"""Which integrations bind. Engines are imported in a process of its own, with our hooks waiting for them."""

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
from otel_infer.instrumentation import registry
from otel_infer.instrumentation.hooks.instrumentor import Instrumentor

PROBE_TIMEOUT_S = 120.0


def check_instrumentations(settings: Config, imports: bool) -> list[Check]:
    """One check for each integration, and one for engines as such."""
    if imports:
        environ = environment.child_environment(enabled="off")
        found, trouble = probe_process.run_in_subprocess(
            "instrumentations", {"excluded_urls": settings.excluded_urls}, environ, PROBE_TIMEOUT_S
        )
    else:
        found, trouble = list(run_probe({"excluded_urls": settings.excluded_urls, "imports": False})), ""
    checks = [check_instrumentor(seen, is_disabled(seen["name"], settings)) for seen in found]
    return [*checks, _report_aborted_import(len(found), trouble) if trouble else check_engine(found)]


def is_disabled(name: str, settings: Config) -> bool:
    """Whether the configuration leaves this integration out."""
    listed = not settings.integrations or name in settings.integrations
    return not listed or bool({name, f"otel_infer_{name}"} & set(settings.disabled_integrations))


# ── in the other process ─────────────────────────────────────────────────────────────────────────────────────────


def run_probe(told: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What is bound of each integration, after its library was imported unless that is not wanted."""
    registry.configure_instrumentors(Config(excluded_urls=told["excluded_urls"]), lambda integration: None)
    for integration in registry.load_instrumentors():
        refused: dict[str, str] = {}
        if told.get("imports", True) and integration.status.state != "absent":
            integration.install()
            refused = {
                name: why for name in _hooked_modules(integration) if (why := _find_import_error(name))
            }
        yield {
            **integration.status.__dict__,
            "engine": integration.is_engine,
            "parts": _describe_parts(integration, refused),
            "unlisted": integration.plugins if _omits_otel_infer(os.environ.get(integration.plugins)) else "",
        }


def _omits_otel_infer(plugins: str | None) -> bool:
    """Whether a list of plugins is without us; where there is no list all are loaded."""
    return plugins is not None and "otel_infer" not in plugins.split(",")


def _hooked_modules(integration: Instrumentor) -> list[str]:
    """All that it hooks in, once each, in the order in which it names them; without hooks, what it watches."""
    hooked = [hook.module for part in integration._parts.values() for hook in part.hooks]
    return list(dict.fromkeys(hooked or integration.modules))


def _find_import_error(name: str) -> str:
    """Why a module cannot be imported; nothing if it can, or if this release has none of that name."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as missing:
        own = missing.name and (name == missing.name or name.startswith(f"{missing.name}."))
        return "" if own else f"there is no module {missing.name}"
    except BaseException as broken:  # whatever an import may do, SystemExit included
        said = str(broken).strip().splitlines()
        return f"{type(broken).__name__}: {said[0][: probe_process.MAX_REASON_CHARS] if said else ''}".rstrip(
            ": "
        )
    return ""


def _describe_parts(integration: Instrumentor, refused: Mapping[str, str]) -> list[dict[str, Any]]:
    parts = []
    for part in integration._parts.values():
        state, drift = integration._resolve_part_state(part)
        why = next((refused[hook.module] for hook in part.hooks if hook.module in refused), "")
        active = sum(hook.active for hook in part.hooks)
        parts.append(
            {
                "name": part.name,
                "state": state,
                "drift": drift,
                "refused": why,
                "where": integration.where.get(part.name, ""),
                "hooks_active": active,
                "hooks_total": 0 if state == "absent" else part.count_expected(),
            }
        )
    return parts


# ── what to say of it ────────────────────────────────────────────────────────────────────────────────────────────


def check_instrumentor(seen: Mapping[str, Any], off: bool) -> Check:
    """One integration as a check."""
    name = f"integration {seen['name']}"
    if off:
        return Check(name, "ok", "switched off by the configuration")
    if seen["state"] == "absent":
        return Check(name, "ok", f"{seen['distribution']} is not installed")
    which = f"{seen['distribution']} {seen['version']}" if seen["version"] else seen["distribution"]
    bound = f"{seen['hooks_active']} of {seen['hooks_total']} hooks bound"
    if seen["state"] == "drifted":
        said = f"{which}: drifted, {bound}{_hooks_by_process(seen)}; {_describe_drift(seen)}"
        return Check(name, "fail", said, _drift_remedy(seen))
    broken = sorted({part["refused"] for part in seen["parts"] if part["refused"]})
    if seen["state"] == "waiting" and broken:
        do = f"run `{sys.executable} -c 'import {seen['name']}'`: it fails without us, too"
        return Check(name, "warn", f"{which}: cannot be imported: {'; '.join(broken)}", do)
    if seen.get("unlisted"):
        do = f"name otel_infer in {seen['unlisted']}, or start your server with `otel-infer run -- …`"
        found = f"{which}: {bound}, but {seen['unlisted']} does not name otel_infer, so that {seen['name']} does not load it"
        return Check(name, "warn", found, do)
    if not seen["hooks_total"]:
        return Check(name, "ok", f"{which}: nothing to hook")
    return Check(
        name, "ok", f"{which}: {seen['state']}, {bound}{_hooks_by_process(seen)}{_describe_unbound(seen)}"
    )


def check_engine(found: list[dict[str, Any]]) -> Check:
    """Whether there is any engine at all."""
    supported = [seen["distribution"] for seen in found if _is_engine(seen)]
    present = [seen["distribution"] for seen in found if _is_engine(seen) and seen["state"] != "absent"]
    if present:
        return Check("engine", "ok", ", ".join(present))
    said = f"none is installed for {sys.executable}; supported: {', '.join(supported)}"
    do = f"run {sys.executable} -m pip install 'transformers[serving]' torch, or run `otel-infer doctor` with the "
    return Check("engine", "warn", said, f"{do}Python that runs your server")


def _is_engine(seen: Mapping[str, Any]) -> bool:
    return bool(seen["engine"])


def _describe_drift(seen: Mapping[str, Any]) -> str:
    """What drifted, why, and what is not recorded for it."""
    drifted = [part for part in seen["parts"] if part["state"] == "drifted"]
    why = "; ".join(str(part["drift"]) for part in drifted)
    lost = " and ".join(part["name"] or seen["name"] for part in drifted)
    rest = any(part["state"] in ("active", "waiting") for part in seen["parts"])
    verb = "are" if len(drifted) > 1 else "is"
    return f"{why}. {lost} {verb} not recorded; {'everything else is' if rest else 'the server runs on all the same'}"


def _hooks_by_process(seen: Mapping[str, Any]) -> str:
    """How many of how many in each process, where the library has several."""
    bound: dict[str, tuple[int, int]] = {}
    for part in seen["parts"]:
        if part.get("where"):
            active, total = bound.get(part["where"], (0, 0))
            bound[part["where"]] = active + part["hooks_active"], total + part["hooks_total"]
    said = ", ".join(f"{where} {active} of {total}" for where, (active, total) in bound.items())
    return f" ({said})" if said else ""


def _drift_remedy(seen: Mapping[str, Any]) -> str:
    library = seen["distribution"]
    return f"{sys.executable} -m pip install -U otel-infer; if that is no help, install another release of {library}"


def _describe_unbound(seen: Mapping[str, Any]) -> str:
    """The parts that wait, and what for."""
    waiting = [part for part in seen["parts"] if part["state"] == "waiting" and seen["state"] == "active"]
    said = [
        f"{part['name'] or seen['name']} waits{': ' * bool(part['refused'])}{part['refused']}"
        for part in waiting
    ]
    absent = [part["name"] for part in seen["parts"] if part["state"] == "absent"]
    said += [f"not here: {', '.join(absent)}"] if absent else []
    return "".join(f"; {one}" for one in said)


def _report_aborted_import(after: int, trouble: str) -> Check:
    names = list(registry.BUILTIN)
    name = names[after] if after < len(names) else "another distribution's"
    do = f"run `{sys.executable} -c 'import {name}'`: if that is no better, the trouble is not ours; else --no-imports"
    return Check(f"integration {name}", "fail", f"importing what it hooks {trouble}", do)
