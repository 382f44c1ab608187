"""Which pieces of an event stream bring a token, without holding any of them back."""

from __future__ import annotations

FIELD, DONE = b"data:", b"[DONE]"
LONGEST = 64
"""Bytes of an unfinished line that are kept to judge it; by then it says what it is, or it is blanks."""
JUDGED = b":"
"""Stands for the beginning of a line that is known: with it, the rest is a comment."""


class Events:
    """The lines of `text/event-stream`, however they are cut into pieces."""

    def __init__(self) -> None:
        self.over = False
        self._begun = b""

    def bring_token(self, chunk: bytes) -> bool:
        """Whether this piece has the first bytes of some `data:` that is neither empty nor the end of the stream."""
        text = (self._begun + chunk).replace(b"\r", b"\n")
        *lines, begun = text.split(b"\n")
        found = False
        for line in lines:
            data = _data(line)
            if data == DONE:
                self.over = True
            elif data:
                found = True
        data = _data(begun)
        self.over = self.over or data == DONE
        if data and not DONE.startswith(data):
            found, begun = True, JUDGED
        elif len(begun) > LONGEST or (not data and not FIELD.startswith(begun[: len(FIELD)])):
            begun = JUDGED
        self._begun = begun
        return found


def _data(line: bytes) -> bytes:
    """What a line says, if it is one with data."""
    return line[len(FIELD) :].strip() if line.startswith(FIELD) else b""
