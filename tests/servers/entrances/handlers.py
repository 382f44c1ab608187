"""What the user's code behind an entrance does, and what came out on the other side."""

from __future__ import annotations

import http.client

TEXT, ANSWER = "text", "TEXT"


class KeptError(Exception):
    """The exception of the user's code."""


class Handlers:
    """The user's code. A driver adds to `answers` what the client got, and to `errors` what the library caught."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.error = KeptError("kept")
        self.answers: list[str] = []
        self.errors: list[BaseException | None] = []

    def work(self, text: str = TEXT) -> str:
        self.calls.append("work")
        return text.upper()

    def fail(self) -> str:
        self.calls.append("fail")
        raise self.error

    def describe(self) -> tuple[list[str], list[str], list[str]]:
        """Returns the calls, the answers, and which exceptions were caught: `same` is the one that was raised."""
        caught = ["same" if error is self.error else repr(error) for error in self.errors]
        return sorted(self.calls), self.answers, caught


def fetch(port: int, path: str) -> str:
    """Returns status and body of a POST."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("POST", path, b"{}", {"connection": "close", "content-type": "application/json"})
    response = connection.getresponse()
    body = response.read().decode()
    connection.close()
    return f"{response.status} {body}"
