"""Which pieces of an event stream bring a token, without holding any of them back."""

from __future__ import annotations

import json

FIELD, DONE = b"data:", b"[DONE]"
RESPONSE, DELTA = "response.", ".delta"
"""How the types of the Responses API's events begin, and those end that bring something to read."""
OPENING = frozenset(("message_start", "content_block_start", "ping"))
"""Types of the Messages API's events that come before there is something to read (docs.claude.com, "Streaming messages")."""
LONGEST = 4096
"""Bytes of an unfinished line that are kept to judge it; an event that only opens an answer is shorter."""
JUDGED = b":"
"""Stands for the beginning of a line that is known: with it, the rest is a comment."""


class Events:
    """The lines of `text/event-stream`, however they are cut into pieces. `over`: the stream said that this was all."""

    def __init__(self) -> None:
        self.over = False
        self._opening = True
        self._begun = b""

    def bring_token(self, chunk: bytes) -> bool:
        """Whether this piece has the first bytes of some `data:` that is neither empty nor the end of the stream.

        Chat servers open an answer with an event that names the role and has no text, servers of the Responses and of the Messages
        API with some that say that it was created: those before the first text are not counted. Nobody's events are read any more once a
        token was found.
        """
        *lines, begun = (self._begun + chunk).replace(b"\r", b"\n").split(b"\n")
        found = False
        for line in lines:
            found = self._is_token(_data(line)) or found
        data = _data(begun)
        self.over = self.over or data == DONE
        if len(begun) > LONGEST or (data and not self._may_open(data)):
            found, begun = found or bool(data), JUDGED
            self._opening = self._opening and not found
        elif not data and not begun.startswith(FIELD) and not FIELD.startswith(begun):
            begun = JUDGED
        self._begun = begun
        return found

    def _is_token(self, data: bytes) -> bool:
        if data == DONE:
            self.over = True
        elif data and not (self._opening and _says_nothing(data)):
            self._opening = False
            return True
        return False

    def _may_open(self, data: bytes) -> bool:
        """Whether this beginning of a line may yet turn out to be no token."""
        return DONE.startswith(data) or (self._opening and data.startswith(b"{"))


def _data(line: bytes) -> bytes:
    """What a line says, if it is one with data."""
    return line[len(FIELD) :].strip() if line.startswith(FIELD) else b""


def _says_nothing(data: bytes) -> bool:
    """Whether this is an event with nothing to read in it: of a chat completion the role, or figures; of a response any that is
    no part of its text (developers.openai.com/api/reference, "Streaming events"); of a message its beginning."""
    try:
        said = json.loads(data)
        kind = str(said.get("type", ""))
        if kind.startswith(RESPONSE):
            return not kind.endswith(DELTA)
        if kind in OPENING:
            return True
        deltas = [choice["delta"] for choice in said["choices"]]
        return not any(said for delta in deltas for name, said in delta.items() if name != "role")
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return False
