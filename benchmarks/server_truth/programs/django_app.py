"""Django, as a WSGI application (`wsgi`) and as an ASGI application (`asgi`)."""

from __future__ import annotations

import django
from django.conf import settings
from django.core.asgi import get_asgi_application
from django.core.wsgi import get_wsgi_application
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.urls import path
from django.views.decorators.csrf import csrf_exempt

from benchmarks.server_truth.programs.work import classify, finish

settings.configure(
    ROOT_URLCONF=__name__,
    ALLOWED_HOSTS=["*"],
    SECRET_KEY="x",
    MIDDLEWARE=["django.middleware.common.CommonMiddleware"],
    DEBUG=False,
)
django.setup()


@csrf_exempt
def classify_text(request: HttpRequest) -> HttpResponse:
    return JsonResponse(finish(classify()))


urlpatterns = [path("classify", classify_text)]
wsgi, asgi = get_wsgi_application(), get_asgi_application()
