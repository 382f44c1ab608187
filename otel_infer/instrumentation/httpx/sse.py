"""Detects which chunks of an event stream contain a token, without delaying any of them."""

from __future__ import annotations

import json

DATA_FIELD, DONE = b"data:", b"[DONE]"
RESPONSE_PREFIX, DELTA_SUFFIX = "response.", ".delta"
"""Prefix of the event types of the Responses API, and suffix of the types that contain output."""
PREAMBLE_TYPES = frozenset(("message_start", "content_block_start", "ping"))
"""Event types of the Messages API that precede the output (docs.claude.com, "Streaming messages")."""
MAX_PARTIAL_LINE = 4096
"""Bytes of an unfinished line that are buffered to classify it; events that open a response are shorter."""
IGNORE_REST = b":"
"""Replaces the buffered beginning of a line that is already classified. It turns the rest into a comment."""


class SseParser:
    """A parser for the lines of `text/event-stream`, however they are split into chunks.

    `ended`: the end marker of the stream (`[DONE]`) was read.
    """

    def __init__(self) -> None:
        self.ended = False
        self._in_preamble = True
        self._partial_line = b""

    def scan_for_token(self, chunk: bytes) -> bool:
        """Returns whether the chunk has the first bytes of a `data:` value other than the end marker.

        Events before the first output are not counted. Chat completions open a response with an event that
        holds the role and no text. The Responses and Messages APIs open it with events about its creation.
        Once a token was found, the JSON of events is no longer parsed.
        """
        *lines, partial_line = (self._partial_line + chunk).replace(b"\r", b"\n").split(b"\n")
        has_token = False
        for line in lines:
            has_token = self._is_token(_parse_data(line)) or has_token
        data = _parse_data(partial_line)
        self.ended = self.ended or data == DONE
        if len(partial_line) > MAX_PARTIAL_LINE or (data and not self._may_be_preamble(data)):
            has_token, partial_line = has_token or bool(data), IGNORE_REST
            self._in_preamble = self._in_preamble and not has_token
        elif not data and not partial_line.startswith(DATA_FIELD) and not DATA_FIELD.startswith(partial_line):
            partial_line = IGNORE_REST
        self._partial_line = partial_line
        return has_token

    def _is_token(self, data: bytes) -> bool:
        if data == DONE:
            self.ended = True
        elif data and not (self._in_preamble and _has_no_text(data)):
            self._in_preamble = False
            return True
        return False

    def _may_be_preamble(self, data: bytes) -> bool:
        """Returns whether the rest of this unfinished line may still show that it is no token."""
        return DONE.startswith(data) or (self._in_preamble and data.startswith(b"{"))


def _parse_data(line: bytes) -> bytes:
    """Returns the value of a `data:` line; empty for any other line."""
    return line[len(DATA_FIELD) :].strip() if line.startswith(DATA_FIELD) else b""


def _has_no_text(data: bytes) -> bool:
    """Returns whether the event contains no output.

    Chat completions: an event with the role or usage only. Responses API: a `response.` type without the
    suffix `.delta` (developers.openai.com/api/reference, "Streaming events"). Messages API: the types that
    precede the output.
    """
    try:
        event = json.loads(data)
        kind = str(event.get("type", ""))
        if kind.startswith(RESPONSE_PREFIX):
            return not kind.endswith(DELTA_SUFFIX)
        if kind in PREAMBLE_TYPES:
            return True
        deltas = [choice["delta"] for choice in event["choices"]]
        return not any(value for delta in deltas for name, value in delta.items() if name != "role")
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return False
