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
from otel_infer.instrumentation.hooks.instrumentor import Integration

LIMIT_S = 120.0


def integrations(settings: Config, imports: bool) -> list[Check]:
    """One check for each integration, and one for engines as such."""
    if imports:
        environ = environment.child_environment(enabled="off")
        found, trouble = probe_process.ask(
            "instrumentations", {"excluded_urls": settings.excluded_urls}, environ, LIMIT_S
        )
    else:
        found, trouble = list(answers({"excluded_urls": settings.excluded_urls, "imports": False})), ""
    checks = [finding(seen, is_off(seen["name"], settings)) for seen in found]
    return [*checks, _broke_off(len(found), trouble) if trouble else engine(found)]


def is_off(name: str, settings: Config) -> bool:
    """Whether the configuration leaves this integration out."""
    listed = not settings.integrations or name in settings.integrations
    return not listed or bool({name, f"otel_infer_{name}"} & set(settings.disabled_integrations))


# ── in the other process ─────────────────────────────────────────────────────────────────────────────────────────


def answers(told: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What is bound of each integration, after its library was imported unless that is not wanted."""
    registry.configure(Config(excluded_urls=told["excluded_urls"]), lambda integration: None)
    for integration in registry.load():
        refused: dict[str, str] = {}
        if told.get("imports", True) and integration.status.state != "absent":
            integration.install()
            refused = {name: why for name in _modules(integration) if (why := _imported(name))}
        yield {
            **integration.status.__dict__,
            "engine": integration.is_engine,
            "parts": _parts(integration, refused),
            "unlisted": integration.plugins if _leaves_us_out(os.environ.get(integration.plugins)) else "",
        }


def _leaves_us_out(plugins: str | None) -> bool:
    """Whether a list of plugins is without us; where there is no list all are loaded."""
    return plugins is not None and "otel_infer" not in plugins.split(",")


def _modules(integration: Integration) -> list[str]:
    """All that it hooks in, once each, in the order in which it names them; without hooks, what it watches."""
    hooked = [hook.module for part in integration._parts.values() for hook in part.hooks]
    return list(dict.fromkeys(hooked or integration.modules))


def _imported(name: str) -> str:
    """Why a module cannot be imported; nothing if it can, or if this release has none of that name."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as missing:
        own = missing.name and (name == missing.name or name.startswith(f"{missing.name}."))
        return "" if own else f"there is no module {missing.name}"
    except BaseException as broken:  # whatever an import may do, SystemExit included
        said = str(broken).strip().splitlines()
        return f"{type(broken).__name__}: {said[0][: probe_process.LONGEST] if said else ''}".rstrip(": ")
    return ""


def _parts(integration: Integration, refused: Mapping[str, str]) -> list[dict[str, Any]]:
    parts = []
    for part in integration._parts.values():
        state, drift = integration._view(part)
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
                "hooks_total": 0 if state == "absent" else part.expected(),
            }
        )
    return parts


# ── what to say of it ────────────────────────────────────────────────────────────────────────────────────────────


def finding(seen: Mapping[str, Any], off: bool) -> Check:
    """One integration as a check."""
    name = f"integration {seen['name']}"
    if off:
        return Check(name, "ok", "switched off by the configuration")
    if seen["state"] == "absent":
        return Check(name, "ok", f"{seen['distribution']} is not installed")
    which = f"{seen['distribution']} {seen['version']}" if seen["version"] else seen["distribution"]
    bound = f"{seen['hooks_active']} of {seen['hooks_total']} hooks bound"
    if seen["state"] == "drifted":
        said = f"{which}: drifted, {bound}{_by_process(seen)}; {_loss(seen)}"
        return Check(name, "fail", said, _against_drift(seen))
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
    return Check(name, "ok", f"{which}: {seen['state']}, {bound}{_by_process(seen)}{_unbound(seen)}")


def engine(found: list[dict[str, Any]]) -> Check:
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


def _loss(seen: Mapping[str, Any]) -> str:
    """What drifted, why, and what is not recorded for it."""
    drifted = [part for part in seen["parts"] if part["state"] == "drifted"]
    why = "; ".join(str(part["drift"]) for part in drifted)
    lost = " and ".join(part["name"] or seen["name"] for part in drifted)
    rest = any(part["state"] in ("active", "waiting") for part in seen["parts"])
    verb = "are" if len(drifted) > 1 else "is"
    return f"{why}. {lost} {verb} not recorded; {'everything else is' if rest else 'the server runs on all the same'}"


def _by_process(seen: Mapping[str, Any]) -> str:
    """How many of how many in each process, where the library has several."""
    bound: dict[str, tuple[int, int]] = {}
    for part in seen["parts"]:
        if part.get("where"):
            active, total = bound.get(part["where"], (0, 0))
            bound[part["where"]] = active + part["hooks_active"], total + part["hooks_total"]
    said = ", ".join(f"{where} {active} of {total}" for where, (active, total) in bound.items())
    return f" ({said})" if said else ""


def _against_drift(seen: Mapping[str, Any]) -> str:
    library = seen["distribution"]
    return f"{sys.executable} -m pip install -U otel-infer; if that is no help, install another release of {library}"


def _unbound(seen: Mapping[str, Any]) -> str:
    """The parts that wait, and what for."""
    waiting = [part for part in seen["parts"] if part["state"] == "waiting" and seen["state"] == "active"]
    said = [
        f"{part['name'] or seen['name']} waits{': ' * bool(part['refused'])}{part['refused']}"
        for part in waiting
    ]
    absent = [part["name"] for part in seen["parts"] if part["state"] == "absent"]
    said += [f"not here: {', '.join(absent)}"] if absent else []
    return "".join(f"; {one}" for one in said)


def _broke_off(after: int, trouble: str) -> Check:
    names = list(registry.BUILTIN)
    name = names[after] if after < len(names) else "another distribution's"
    do = f"run `{sys.executable} -c 'import {name}'`: if that is no better, the trouble is not ours; else --no-imports"
    return Check(f"integration {name}", "fail", f"importing what it hooks {trouble}", do)
