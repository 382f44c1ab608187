"""otel_infer on the simulated engine, the way an integration would put it there, and otel_infer pointed at a receiver.

The simulated engine runs in one thread, so a request's arrival and end are stated on it too; in a real server the thread
that talks to the client pays for those.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import otel_infer
from benchmarks import machine
from benchmarks.engine import Engine, Sequence
from otel_infer import clock, facts, ingress
from otel_infer._wiring import wiring
from otel_infer.patching import Hook
from otel_infer.ring.membership import StepLog
from otel_infer.ring.recorder import recorder

ENGINE = "simulator"
MODEL = "simulated"

_packed_of = attrgetter("packed")


class Exporting:
    """otel_infer with every step of every request exported by the real sidecar, for as long as `with` lasts."""

    def __init__(self, endpoint: str, integrations: tuple[str, ...] = ("none of them",)) -> None:
        for name in [name for name in os.environ if name.startswith("OTEL_")]:
            del os.environ[name]
        os.environ.update(
            OTEL_EXPORTER_OTLP_ENDPOINT=endpoint, OTEL_INFER_STEPS="all", OTEL_INFER_MODE="sidecar"
        )
        otel_infer.instrument(integrations=integrations)
        if not recorder.ensure() or wiring.sidecar is None:
            raise RuntimeError("the sidecar was not started; `otel-infer doctor` says why")
        self.pid: int = wiring.sidecar.pid
        if not otel_infer.flush(30):
            raise RuntimeError("the sidecar does not answer")
        _, others = machine.cores()
        machine.pin_process(self.pid, others)

    def flush(self) -> None:
        """Everything stated so far is with the receiver afterwards."""
        if not otel_infer.flush(60):
            raise RuntimeError("the sidecar did not get everything sent within a minute")

    def __enter__(self) -> Exporting:
        return self

    def __exit__(self, *_: object) -> None:
        sidecar = wiring.sidecar
        otel_infer.uninstrument()
        if sidecar is not None:
            sidecar.wait(30)


class Binding:
    """Our hooks on one engine. `put_on` and `take_off` change what the engine calls: off is the bare engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        log = recorder.step_log(ENGINE)
        if log is None:
            raise RuntimeError("no step log to be had")
        self.log: StepLog = log
        self.hook = Hook("benchmarks.engine:Engine")
        self.steps_expected = 0
        self._left: list[Sequence] = []
        self._known: dict[Sequence, int] = {}
        self._steps = self._step = 0
        # Members are told apart by the objects themselves; each carries its handle, as transformers' states do.
        self.log.pack = lambda members: b"".join(map(_packed_of, members))

    def put_on(self) -> None:
        """Catches up with what came and went meanwhile, then hooks the engine."""
        running = set(self.engine.running)
        for sequence in [known for known in self._known if known not in running]:
            self._ended(sequence)
        for sequence in self.engine.running:
            if sequence not in self._known:
                self._arrived(sequence)
        engine = self.engine
        engine.schedule = self._scheduling(engine.schedule)  # type: ignore[method-assign]
        engine.update = self._updating(engine.update)  # type: ignore[method-assign]
        engine.admit = self._admitting(engine.admit)  # type: ignore[method-assign]

    def take_off(self) -> None:
        """The bare engine again."""
        for name in ("schedule", "update", "admit"):
            delattr(self.engine, name)

    def end_all(self) -> None:
        """Whoever is in flight ends here."""
        for sequence in list(self._known):
            self._ended(sequence)
        recorder.give_back(ENGINE, self.log)

    def _scheduling(self, original: Callable[[], list[Sequence]]) -> Callable[[], list[Sequence]]:
        engine, hook, log = self.engine, self.hook, self.log

        def schedule() -> list[Sequence]:
            running = original()
            if hook.alive and recorder.active:
                try:
                    members = running.copy()  # the engine goes on changing its own
                    plain = engine.total_tokens == len(members)
                    tokens = b"" if plain else array("I", engine.scheduled_tokens.values()).tobytes()
                    self._step = log.scheduled(members, self._left, tokens, 0, 0, len(members), 0)
                    self._left = []
                except Exception as reason:
                    hook.fail(reason)
            return running

        return schedule

    def _updating(self, original: Callable[[], list[Sequence]]) -> Callable[[], list[Sequence]]:
        hook, log, engine = self.hook, self.log, self.engine

        def update() -> list[Sequence]:
            finished = original()
            if hook.alive and recorder.active:
                try:
                    log.done(self._step, b"", engine.size)
                    self._steps += 1
                    for sequence in finished:
                        self._ended(sequence)
                except Exception as reason:
                    hook.fail(reason)
            return finished

        return update

    def _admitting(self, original: Callable[[], Sequence]) -> Callable[[], Sequence]:
        def admit() -> Sequence:
            sequence = original()
            self._arrived(sequence)
            return sequence

        return admit

    def _arrived(self, sequence: Sequence) -> None:
        request: Any = ingress.open_request(
            f"chat {MODEL}", owner=ENGINE, operation="chat", provider=ENGINE, model=MODEL
        )
        request.submitted(ENGINE, 1, 0, 0)
        request.state(facts.RequestReceived(clock.now()))
        sequence.live, sequence.packed = request, request.packed
        self._known[sequence] = self._steps

    def _ended(self, sequence: Sequence) -> None:
        self._left.append(sequence)
        seen = self._steps - self._known.pop(sequence)
        self.steps_expected += max(seen - 1, 0)  # the first is the prefill's
        sequence.live.state(facts.EngineFinished(clock.now(), "length", 0))
        sequence.live.close()
