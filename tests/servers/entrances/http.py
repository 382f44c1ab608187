"""HTTP servers."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from tests.servers.entrances.handlers import Handlers, fetch
from tests.support.served import free_port

FAILED = "failed"


def make_flask(handlers: Handlers) -> Any:
    import flask

    app = flask.Flask(__name__)
    app.post("/work", endpoint="work")(lambda: handlers.work())
    app.post("/fail", endpoint="fail")(lambda: handlers.fail())

    @app.errorhandler(Exception)
    def catch(error: Exception) -> tuple[str, int]:
        handlers.errors.append(error)
        return FAILED, 500

    return app


def fetch_both(handlers: Handlers, port: int) -> None:
    handlers.answers += [fetch(port, "/work"), fetch(port, "/fail")]


def drive_in_thread(
    handlers: Handlers, port: int, serve: Callable[[], None], stop: Callable[[], None]
) -> None:
    thread = threading.Thread(target=serve)
    thread.start()
    try:
        fetch_both(handlers, port)
    finally:
        stop()
        thread.join(10)


def drive_werkzeug(handlers: Handlers) -> None:
    from werkzeug import serving

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = serving.make_server("127.0.0.1", 0, make_flask(handlers), threaded=True)
    drive_in_thread(handlers, server.server_port, server.serve_forever, server.shutdown)


def drive_waitress(handlers: Handlers) -> None:
    import waitress

    server = waitress.create_server(make_flask(handlers), host="127.0.0.1", port=free_port(), threads=2)

    def serve() -> None:
        try:
            server.run()
        except OSError:  # the loop of waitress has no other way to end
            pass

    def stop() -> None:
        server.maintenance_interval = 0
        server.close()

    drive_in_thread(handlers, server.effective_port, serve, stop)


def drive_wsgiref(handlers: Handlers) -> None:
    class Quiet(WSGIRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

    server = make_server("127.0.0.1", 0, make_flask(handlers), handler_class=Quiet)
    drive_in_thread(handlers, server.server_port, server.serve_forever, server.shutdown)
    server.server_close()


def drive_gevent(handlers: Handlers) -> None:
    from gevent import pywsgi, threadpool

    server = pywsgi.WSGIServer(("127.0.0.1", 0), make_flask(handlers), log=None)
    server.start()
    pool = threadpool.ThreadPool(1)
    try:
        pool.spawn(fetch_both, handlers, server.server_port).get()
    finally:
        server.stop()
        pool.kill()


def drive_aiohttp(handlers: Handlers) -> None:
    from aiohttp import web

    @web.middleware
    async def catch(request: web.Request, handler: Any) -> Any:
        try:
            return await handler(request)
        except Exception as error:
            handlers.errors.append(error)
            return web.Response(text=FAILED, status=500)

    async def work(request: web.Request) -> web.Response:
        return web.Response(text=handlers.work())

    async def fail(request: web.Request) -> web.Response:
        return web.Response(text=handlers.fail())

    async def serve() -> None:
        app = web.Application(middlewares=[catch])
        app.add_routes([web.post("/work", work), web.post("/fail", fail)])
        runner = web.AppRunner(app)
        await runner.setup()
        port = free_port()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        await asyncio.to_thread(fetch_both, handlers, port)
        await runner.cleanup()

    asyncio.run(serve())


def drive_tornado(handlers: Handlers) -> None:
    from tornado import web

    class Work(web.RequestHandler):
        async def post(self) -> None:
            self.finish(handlers.work())

    class Fail(web.RequestHandler):
        async def post(self) -> None:
            self.finish(handlers.fail())

        def log_exception(self, kind: Any, error: Any, traceback: Any) -> None:
            handlers.errors.append(error)

        def write_error(self, status_code: int, **kwargs: Any) -> None:
            self.finish(FAILED)

    async def serve() -> None:
        port = free_port()
        logging.getLogger("tornado.access").disabled = True
        server = web.Application([("/work", Work), ("/fail", Fail)]).listen(port, "127.0.0.1")
        await asyncio.to_thread(fetch_both, handlers, port)
        server.stop()

    asyncio.run(serve())


def drive_sanic(handlers: Handlers) -> None:
    from sanic import Request, Sanic, text

    Sanic.test_mode = True  # otherwise only one application of a process can start
    app = Sanic(f"app_{id(handlers)}", configure_logging=False)

    @app.post("/work")
    async def work(request: Request) -> Any:
        return text(handlers.work())

    @app.post("/fail")
    async def fail(request: Request) -> Any:
        return text(handlers.fail())

    @app.exception(Exception)
    async def catch(request: Request, error: Exception) -> Any:
        handlers.errors.append(error)
        return text(FAILED, status=500)

    async def serve() -> None:
        port = free_port()
        server = await app.create_server("127.0.0.1", port, return_asyncio_server=True, access_log=False)
        assert server is not None
        await server.startup()
        await server.start_serving()
        await asyncio.to_thread(fetch_both, handlers, port)
        await server.close()

    asyncio.run(serve())


def drive_uvicorn(handlers: Handlers) -> None:
    import uvicorn
    from fastapi import FastAPI, Request
    from fastapi.responses import PlainTextResponse

    app = FastAPI()
    app.post("/work", response_class=PlainTextResponse)(lambda: handlers.work())
    app.post("/fail", response_class=PlainTextResponse)(lambda: handlers.fail())

    @app.exception_handler(type(handlers.error))
    async def catch(request: Request, error: Exception) -> PlainTextResponse:
        handlers.errors.append(error)
        return PlainTextResponse(FAILED, 500)

    async def serve() -> None:
        port = free_port()
        server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning", access_log=False))
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(fetch_both, handlers, port)
        server.should_exit = True
        await serving

    asyncio.run(serve())
