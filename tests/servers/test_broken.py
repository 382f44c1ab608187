"""An error of our own, or the removal of all hooks, changes no response: each entrance, each place."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from tests.servers.apps.broken import PLACES
from tests.servers.requests_sent import send
from tests.servers.serving import ServedApp, make_command
from tests.servers.test_grpc import GrpcServer
from tests.support.otlp_receiver import OtlpReceiver
from tests.support.served import Server, free_port

HTTP_APPS = ("flask_app", "falcon_app", "aiohttp_app", "tornado_app", "sanic_app")


def make_app(place: str, *arguments: str) -> ServedApp:
    return ServedApp(("-m", "tests.servers.apps.broken", place, *arguments), "")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", HTTP_APPS)
def test_responses_are_those_of_the_application(name: str, place: str, tmp_path: Path) -> None:
    port, log = free_port(), tmp_path / "log"
    with OtlpReceiver() as receiver:
        environ = {**receiver.environ, "PYTHONPATH": str(Path.cwd())}
        with Server(make_command(make_app(place, name, "{port}"), port), port, log, environ) as server:
            for _ in range(2):
                assert send(port, "POST", "/classify/a").status == 200
                assert send(port, "GET", "/score/a").body.startswith(b"[[")
                assert send(port, "POST", "/stream").body == b"0\n1\n2\n"
                assert send(port, "POST", "/fail").status == 500
            assert "of our own" not in server.read_log()  # our errors are logged by their type
        if place == "uninstrument":
            assert not [span for span in receiver.spans if span["kind"] == 2]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("more", [(), ("aio",)], ids=["threads", "aio"])
def test_remote_calls_get_the_responses_of_the_application(
    more: tuple[str, ...], place: str, tmp_path: Path
) -> None:
    port, log = free_port(), tmp_path / "log"
    with OtlpReceiver() as receiver:
        environ = {**receiver.environ, "PYTHONPATH": str(Path.cwd())}
        app = make_app(place, "grpc_app", "{port}", *more)
        with GrpcServer(make_command(app, port), port, log, environ):
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                for _ in range(2):
                    assert channel.unary_unary("/toy.Scorer/Classify")(b"x", timeout=20).startswith(b"[[")
                    assert list(channel.unary_stream("/toy.Scorer/Stream")(b"x", timeout=20)) == [
                        b"0",
                        b"1",
                        b"2",
                    ]
                    with pytest.raises(grpc.RpcError) as raised:
                        channel.unary_unary("/toy.Scorer/Refuse")(b"x", timeout=20)
                    assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        if place == "uninstrument":
            assert not [span for span in receiver.spans if span["kind"] == 2]
