"""A simulated serving engine: requests arrive, queue and share steps; returns their events without waiting."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from otel_infer.analysis.attribution import request
from otel_infer.assembly.assembler import Assembler
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.ringbuffer import events

MS = 1_000_000
LATER = 1 << 60


@dataclass
class Asked:
    """A request as its client sends it; instants in ms."""

    at: float
    prompt: int = 32
    tokens: int = 32
    before_ms: float = 0.5


@dataclass
class Served:
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
    frozen: list[tuple[float, float]] = field(default_factory=list)
    """(at, ms) in which the event loop is blocked; the engine is not."""
    cold_ms: float = 0.0
    """Extra ms of the first step."""

    def records(self, asked: list[Asked]) -> list[RequestRecord]:
        assembler = Assembler()
        assembler.feed_events(self.facts(asked))
        records = assembler.drain_records(LATER)
        request.attribute_latency(records)
        return records

    def facts(self, asked: list[Asked]) -> list[events.RecordedEvent]:
        draw, said = (
            random.Random(self.seed),
            [events.RecordedEvent(10, 0, events.EngineSeen(0, 1, 1, "toy"))],
        )
        for since, length in self.frozen:
            paused = events.PauseSeen(round((since + length) * MS), round(since * MS), "event_loop")
            said.append(events.RecordedEvent(1, 0, paused))
        coming = sorted(range(len(asked)), key=lambda i: asked[i].at + asked[i].before_ms)
        for i, one in enumerate(asked):
            self._arrives(said, i + 1, one)
        queue: list[int] = []
        running: list[int] = []
        left = {i: one.tokens for i, one in enumerate(asked)}
        fresh: set[int] = set()
        members: list[int] = []
        pauses = sorted(self.pauses)
        at, step = 0.0, 0
        while coming or queue or running:
            while coming and asked[coming[0]].at + asked[coming[0]].before_ms <= at:
                queue.append(coming.pop(0))
            if not running and not queue:
                at = asked[coming[0]].at + asked[coming[0]].before_ms
                continue
            if not running and self.batch_delay and len(queue) < self.max_batch:
                due = asked[queue[0]].at + asked[queue[0]].before_ms + self.batch_delay
                if at < due and (coming or at < due):
                    following = asked[coming[0]].at + asked[coming[0]].before_ms if coming else due
                    at = min(max(following, at), due)
                    if at < due:
                        continue
            if not self.batch_delay or not running:
                while queue and len(running) < self.max_batch:
                    fresh.add(queue[0])
                    running.append(queue.pop(0))
            step += 1
            prompts = tuple((running.index(i), asked[i].prompt) for i in running if i in fresh)
            now = [i + 1 for i in running]
            said.append(events.RecordedEvent(10, 0, events.StepScheduled(
                round(at * MS), step, True, len(now), (), tuple(now), prompts, 0, 0, len(now), len(queue)
            )))  # fmt: skip
            cost = self.base + self.each * len(now) + self.prompt_token * sum(n for _, n in prompts)
            until = at + cost * max(draw.gauss(1, self.noise), 0.5)
            until += self.cold_ms if step == 1 else 0.0
            while pauses and pauses[0][0] < until:
                since, length = pauses.pop(0)
                since = max(since, at)
                said.append(events.RecordedEvent(1, 0, events.PauseSeen(
                    round((since + length) * MS), round(since * MS), "gc"
                )))  # fmt: skip
                until += length
            at = until
            said.append(events.RecordedEvent(10, 0, events.StepDone(round(at * MS), step, (), 0)))
            fresh.clear()
            for i in list(running):
                left[i] -= 1
                if left[i] == 0:
                    running.remove(i)
                    end = round((at + 0.3) * MS)
                    said.append(
                        events.RecordedEvent(1, i + 1, events.EngineFinished(round(at * MS), "stop", 0))
                    )
                    said.append(
                        events.RecordedEvent(
                            1, i + 1, events.RequestEnded(end, events.OK, "", 200, asked[i].tokens, 0, 0)
                        )
                    )
            members = now
        assert members is not None
        return sorted(said, key=lambda fact: fact.event.at)

    @staticmethod
    def _arrives(said: list[events.RecordedEvent], handle: int, one: Asked) -> None:
        at, until = round(one.at * MS), round((one.at + one.before_ms) * MS)
        ids = handle.to_bytes(16, "big")
        said.append(events.RecordedEvent(1, handle, events.RequestArrived(
            at, at, ids, ids[8:], bytes(8), bytes(8), events.SAMPLED, "chat", "toy", "toy", "POST"
        )))  # fmt: skip
        said.append(events.RecordedEvent(1, handle, events.StageEnded(until, at, "ingress", 0)))
        said.append(
            events.RecordedEvent(1, handle, events.RequestSubmitted(until, 1, one.prompt, one.tokens, "toy"))
        )
