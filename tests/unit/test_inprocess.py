"""The thread that reads where there can be no process: whoever flushes and the thread itself take turns."""

from __future__ import annotations

from typing import Any

from otel_infer.config import Config
from otel_infer.inprocess import InProcess
from otel_infer.ring.arena import MemoryArena


def test_only_who_has_the_turn_works_on_sinks_and_others_wait_while_it_is_sent() -> None:
    reader = InProcess(Config(), MemoryArena(), None, {})
    seen: dict[str, bool] = {}

    class Watched:
        def __getattr__(self, name: str) -> Any:
            def called(*args: Any) -> bool:
                seen[name] = reader._turn.locked()
                return True

            return called

    reader._made = Watched()  # type: ignore[assignment]
    assert reader.flush(1.0)
    assert seen == {"wake": True, "settle": True, "flush": True, "is_sent": False}
