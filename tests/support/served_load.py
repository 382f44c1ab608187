"""A simulated serving engine: requests arrive, queue and share steps; returns their events without waiting."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from otel_infer.analysis.attribution.breakdown import attribute_latency
from otel_infer.assembly.assembler import Assembler
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.ringbuffer import events

MS = 1_000_000
AFTER_ALL_EVENTS = 1 << 60


@dataclass
class ClientRequest:
    """A request as its client sends it; instants in ms."""

    at: float
    prompt: int = 32
    tokens: int = 32
    before_ms: float = 0.5


@dataclass
class SimulatedServer:
    """An engine whose step costs `base + each × sequences + prompt_token × prompt tokens` ms, varied by `noise`."""

    base: float = 8.0
    each: float = 0.1
    prompt_token: float = 0.02
    noise: float = 0.05
    max_batch: int = 16
    batch_delay: float = 0.0
    seed: int = 1
    pauses: list[tuple[float, float]] = field(default_factory=list)
    """(at, ms) of garbage collections."""
    blocked_loop: list[tuple[float, float]] = field(default_factory=list)
    """(at, ms) in which the event loop is blocked; the engine is not."""
    cold_ms: float = 0.0
    """Extra ms of the first step."""

    def records(self, load: list[ClientRequest]) -> list[RequestRecord]:
        assembler = Assembler()
        assembler.feed_events(self.simulate(load))
        records = assembler.drain_records(AFTER_ALL_EVENTS)
        attribute_latency(records)
        return records

    def simulate(self, load: list[ClientRequest]) -> list[events.RecordedEvent]:
        draw, recorded = (
            random.Random(self.seed),
            [events.RecordedEvent(10, 0, events.EngineSeen(0, 1, 1, "toy"))],
        )
        for since, length in self.blocked_loop:
            paused = events.PauseSeen(round((since + length) * MS), round(since * MS), "event_loop")
            recorded.append(events.RecordedEvent(1, 0, paused))
        coming = sorted(range(len(load)), key=lambda i: load[i].at + load[i].before_ms)
        for i, client_request in enumerate(load):
            self._record_arrival(recorded, i + 1, client_request)
        queue: list[int] = []
        running: list[int] = []
        left = {i: client_request.tokens for i, client_request in enumerate(load)}
        fresh: set[int] = set()
        members: list[int] = []
        pauses = sorted(self.pauses)
        at, step = 0.0, 0
        while coming or queue or running:
            while coming and load[coming[0]].at + load[coming[0]].before_ms <= at:
                queue.append(coming.pop(0))
            if not running and not queue:
                at = load[coming[0]].at + load[coming[0]].before_ms
                continue
            if not running and self.batch_delay and len(queue) < self.max_batch:
                due = load[queue[0]].at + load[queue[0]].before_ms + self.batch_delay
                if at < due and (coming or at < due):
                    following = load[coming[0]].at + load[coming[0]].before_ms if coming else due
                    at = min(max(following, at), due)
                    if at < due:
                        continue
            if not self.batch_delay or not running:
                while queue and len(running) < self.max_batch:
                    fresh.add(queue[0])
                    running.append(queue.pop(0))
            step += 1
            prompts = tuple((running.index(i), load[i].prompt) for i in running if i in fresh)
            now = [i + 1 for i in running]
            recorded.append(events.RecordedEvent(10, 0, events.StepScheduled(
                round(at * MS), step, True, len(now), (), tuple(now), prompts, 0, 0, len(now), len(queue)
            )))  # fmt: skip
            cost = self.base + self.each * len(now) + self.prompt_token * sum(n for _, n in prompts)
            until = at + cost * max(draw.gauss(1, self.noise), 0.5)
            until += self.cold_ms if step == 1 else 0.0
            while pauses and pauses[0][0] < until:
                since, length = pauses.pop(0)
                since = max(since, at)
                recorded.append(events.RecordedEvent(1, 0, events.PauseSeen(
                    round((since + length) * MS), round(since * MS), "gc"
                )))  # fmt: skip
                until += length
            at = until
            recorded.append(events.RecordedEvent(10, 0, events.StepDone(round(at * MS), step, (), 0)))
            fresh.clear()
            for i in list(running):
                left[i] -= 1
                if left[i] == 0:
                    running.remove(i)
                    end = round((at + 0.3) * MS)
                    recorded.append(
                        events.RecordedEvent(1, i + 1, events.EngineFinished(round(at * MS), "stop", 0))
                    )
                    recorded.append(
                        events.RecordedEvent(
                            1, i + 1, events.RequestEnded(end, events.OK, "", 200, load[i].tokens, 0, 0)
                        )
                    )
            members = now
        assert members is not None
        return sorted(recorded, key=lambda entry: entry.event.at)

    @staticmethod
    def _record_arrival(
        recorded: list[events.RecordedEvent], handle: int, client_request: ClientRequest
    ) -> None:
        at, until = round(client_request.at * MS), round((client_request.at + client_request.before_ms) * MS)
        ids = handle.to_bytes(16, "big")
        recorded.append(events.RecordedEvent(1, handle, events.RequestArrived(
            at, at, ids, ids[8:], bytes(8), bytes(8), events.SAMPLED, "chat", "toy", "toy", "POST"
        )))  # fmt: skip
        recorded.append(events.RecordedEvent(1, handle, events.StageEnded(until, at, "ingress", 0)))
        recorded.append(
            events.RecordedEvent(
                1,
                handle,
                events.RequestSubmitted(until, 1, client_request.prompt, client_request.tokens, "toy"),
            )
        )
