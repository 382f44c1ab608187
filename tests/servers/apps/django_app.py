"""Django, as a WSGI application (`wsgi`) and as an ASGI application (`asgi`)."""

from __future__ import annotations

import django
from django.conf import settings
from django.core.asgi import get_asgi_application
from django.core.wsgi import get_wsgi_application
from django.http import HttpRequest, HttpResponse, JsonResponse, StreamingHttpResponse
from django.urls import path

from tests.servers.apps.scorer import PAUSE_S, score, stream

settings.configure(ROOT_URLCONF=__name__, ALLOWED_HOSTS=["*"], SECRET_KEY="x", MIDDLEWARE=[], DEBUG=False)
django.setup()


def classify(request: HttpRequest, name: str) -> HttpResponse:
    return JsonResponse(score(), safe=False)


def stream_scores(request: HttpRequest) -> StreamingHttpResponse:
    return StreamingHttpResponse(stream())


def stream_slowly(request: HttpRequest) -> StreamingHttpResponse:
    return StreamingHttpResponse(stream(PAUSE_S))


def fail(request: HttpRequest) -> HttpResponse:
    raise RuntimeError("canary")


def report_health(request: HttpRequest) -> HttpResponse:
    return HttpResponse("ok")


urlpatterns = [
    path("classify/<str:name>", classify),
    path("score/<str:name>", classify),
    path("stream", stream_scores),
    path("slow", stream_slowly),
    path("fail", fail),
    path("health", report_health),
]
wsgi, asgi = get_wsgi_application(), get_asgi_application()
