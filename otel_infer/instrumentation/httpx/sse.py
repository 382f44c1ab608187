"""Which pieces of an event stream bring a token, without holding any of them back."""

from __future__ import annotations

import json

DATA_FIELD, DONE = b"data:", b"[DONE]"
RESPONSE_PREFIX, DELTA_SUFFIX = "response.", ".delta"
"""How the types of the Responses API's events begin, and those end that bring something to read."""
PREAMBLE_TYPES = frozenset(("message_start", "content_block_start", "ping"))
"""Types of the Messages API's events that come before there is something to read (docs.claude.com, "Streaming messages")."""
MAX_PARTIAL_LINE = 4096
"""Bytes of an unfinished line that are kept to judge it; an event that only opens an answer is shorter."""
IGNORE_REST = b":"
"""Stands for the beginning of a line that is known: with it, the rest is a comment."""


class SseParser:
    """The lines of `text/event-stream`, however they are cut into pieces. `over`: the stream said that this was all."""

    def __init__(self) -> None:
        self.ended = False
        self._in_preamble = True
        self._partial_line = b""

    def scan_for_token(self, chunk: bytes) -> bool:
        """Whether this piece has the first bytes of some `data:` that is neither empty nor the end of the stream.

        Chat servers open an answer with an event that names the role and has no text, servers of the Responses and of the Messages
        API with some that say that it was created: those before the first text are not counted. Nobody's events are read any more once a
        token was found.
        """
        *lines, begun = (self._partial_line + chunk).replace(b"\r", b"\n").split(b"\n")
        found = False
        for line in lines:
            found = self._is_token(_parse_data(line)) or found
        data = _parse_data(begun)
        self.ended = self.ended or data == DONE
        if len(begun) > MAX_PARTIAL_LINE or (data and not self._may_be_preamble(data)):
            found, begun = found or bool(data), IGNORE_REST
            self._in_preamble = self._in_preamble and not found
        elif not data and not begun.startswith(DATA_FIELD) and not DATA_FIELD.startswith(begun):
            begun = IGNORE_REST
        self._partial_line = begun
        return found

    def _is_token(self, data: bytes) -> bool:
        if data == DONE:
            self.ended = True
        elif data and not (self._in_preamble and _has_no_text(data)):
            self._in_preamble = False
            return True
        return False

    def _may_be_preamble(self, data: bytes) -> bool:
        """Whether this beginning of a line may yet turn out to be no token."""
        return DONE.startswith(data) or (self._in_preamble and data.startswith(b"{"))


def _parse_data(line: bytes) -> bytes:
    """What a line says, if it is one with data."""
    return line[len(DATA_FIELD) :].strip() if line.startswith(DATA_FIELD) else b""


def _has_no_text(data: bytes) -> bool:
    """Whether this is an event with nothing to read in it: of a chat completion the role, or figures; of a response any that is
    no part of its text (developers.openai.com/api/reference, "Streaming events"); of a message its beginning."""
    try:
        said = json.loads(data)
        kind = str(said.get("type", ""))
        if kind.startswith(RESPONSE_PREFIX):
            return not kind.endswith(DELTA_SUFFIX)
        if kind in PREAMBLE_TYPES:
            return True
        deltas = [choice["delta"] for choice in said["choices"]]
        return not any(said for delta in deltas for name, said in delta.items() if name != "role")
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return False
