"""Records an application's startup and shutdown, from the messages of its lifespan.

The startup lasts from the call of the lifespan until it reports completion or failure.
"""

from __future__ import annotations

from otel_infer import _clock
from otel_infer.instrumentation.asgi.exchange import App, Receive
from otel_infer.instrumentation.asgi.exchange_state import Message, Scope, Send
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.recorder import recorder


class Lifespan:
    """One call of an application with its lifespan scope.

    An exception without a `lifespan.startup.failed` message records no end, because the application may have
    no lifespan. Servers continue in that case.
    """

    def __init__(self, send: Send, hook: Hook) -> None:
        self._send, self._hook = send, hook
        self._started_at = _clock.now()
        self._failed = False
        recorder.record_startup(events.PhaseBegan(self._started_at, events.READY))

    async def run(self, call: App, scope: Scope, receive: Receive) -> None:
        """Calls the application, and records a failed startup when the call ends."""

        async def receive_message() -> Message:
            message = await receive()
            self._record_shutdown(message)
            return message

        try:
            await call(scope, receive_message, self.send)
        except BaseException as exc:
            if self._failed:
                self._record_phase_end(type(exc).__qualname__)
            raise
        if self._failed:
            self._record_phase_end(events.OTHER)

    async def send(self, message: Message) -> None:
        """Calls the server's `send`, and reads the state of the startup from the message."""
        try:
            kind = message["type"]
            if kind == "lifespan.startup.failed":
                self._failed = True
            elif kind == "lifespan.startup.complete":
                self._record_phase_end("")
        except BaseException as exc:
            self._hook.mark_failed(exc)
        await self._send(message)

    def _record_shutdown(self, message: Message) -> None:
        """Records the exit here, because a server that stopped on a signal may end by that signal."""
        try:
            if message["type"] == "lifespan.shutdown":
                recorder.record_startup(events.ProcessLeft(_clock.now(), ""))
        except BaseException as exc:
            self._hook.mark_failed(exc)

    def _record_phase_end(self, error_type: str) -> None:
        phase_end = events.PhaseEnded(
            _clock.now(), self._started_at, events.READY, events.BY_LIFESPAN, "", error_type
        )
        recorder.record_startup(phase_end)
