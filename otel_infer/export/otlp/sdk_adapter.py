"""Passes encoded bytes through the SDK's OTLP exporters, which accept spans and encode them.

Uses SDK internals:

* HTTP: the module's global `encode_spans`, which `export` calls. An encoded batch passes through it
  unchanged.
* gRPC: the exporter's `_translate_data`, and `_stub`, from which it makes the client of each channel.

None of these is public. So each exporter is tested without a network before its first use: `IncompatibleSdk`
is raised if the bytes are changed on the way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module, metadata
from types import ModuleType
from typing import Any

_EXPORT_METHOD = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
_CREDENTIAL_PROVIDER_ENV = "OTEL_PYTHON_EXPORTER_OTLP_HTTP_TRACES_CREDENTIAL_PROVIDER"
_TEST_BODY = b"rehearsal"


class IncompatibleSdk(RuntimeError):
    """The installed exporter lacks an internal that encoded bytes pass through; names the release and the
    internal.
    """


class EncodedBatch:
    """An encoded batch. It acts as a sequence of spans (by its length) and as a message (by its bytes)."""

    def __init__(self, body: bytes, count: int) -> None:
        self.body, self._count = body, count

    def __len__(self) -> int:
        return self._count

    def SerializePartialToString(self) -> bytes:  # noqa: N802
        return self.body

    SerializeToString = SerializePartialToString


def make_http_exporter(compression: str, session: Any) -> Any:
    """Returns the SDK's HTTP exporter, which accepts `EncodedBatch` and sends through this
    `requests.Session`.

    `compression`: `none` or `deflate`. Raises ImportError and `IncompatibleSdk`.
    """
    module = _import_exporter("http")
    _patch_encode_spans(module)
    names = import_module("opentelemetry.exporter.otlp.proto.http").Compression
    _check_http_exporter(functools.partial(module.OTLPSpanExporter, compression=names.NoCompression))
    return module.OTLPSpanExporter(compression=names(compression), session=session)


def make_http_session() -> Any:
    """Returns the `requests.Session` of the user's credential provider (newer releases), else a new one."""
    load = getattr(_import_exporter("http"), "_load_session_from_envvar", None)
    return (load(_CREDENTIAL_PROVIDER_ENV) if load else None) or import_module("requests").Session()


def make_grpc_exporter(compression: str, interceptor: Callable[[Callable[[], bytes]], bytes]) -> Any:
    """Returns the SDK's gRPC exporter, which accepts `EncodedBatch`.

    `compression`: `none`, `gzip` or `deflate`. `interceptor`: receives each call, makes it and returns its
    response. Raises ImportError and `IncompatibleSdk`.
    """
    module = _import_exporter("grpc")
    names = import_module("grpc").Compression
    chosen = {"none": names.NoCompression, "gzip": names.Gzip, "deflate": names.Deflate}[compression]
    _check_grpc_exporter(module, chosen)
    return _make_exporter_class(module, functools.partial(_BytesStub, interceptor))(compression=chosen)


class _BytesStub:
    """Replacement for the generated stub, whose serializer requires a message: sends bytes unchanged."""

    def __init__(self, interceptor: Callable[[Callable[[], bytes]], bytes], channel: Any) -> None:
        self._interceptor = interceptor
        self._call = channel.unary_unary(_EXPORT_METHOD)

    def Export(self, request: bytes, **options: Any) -> bytes:  # noqa: N802
        return self._interceptor(functools.partial(self._call, request, **options))


def _make_exporter_class(module: ModuleType, make_stub: Callable[[Any], Any]) -> Any:
    """Returns a subclass of the exporter that sends encoded batches through the stubs of `make_stub`."""

    class EncodedBatchExporter(module.OTLPSpanExporter):  # type: ignore[misc, name-defined]
        # Old releases read a class attribute. Newer releases set it on the instance: no effect here.
        _stub = property(lambda self: make_stub, lambda self, generated: None)

        def _translate_data(self, data: EncodedBatch) -> bytes:
            return data.body

    return EncodedBatchExporter


def _patch_encode_spans(module: ModuleType) -> None:
    """Patches `encode_spans` once per process, for all exporters in it. Real spans are encoded as before."""
    encode = getattr(module, "encode_spans", None)
    if encode is None:
        raise _make_incompatible_error("http", "its module trace_exporter has no `encode_spans`")
    if hasattr(encode, "lets_ready_batches_pass"):
        return

    @functools.wraps(encode)
    def encode_or_pass(spans: Any) -> Any:
        return spans if hasattr(spans, "SerializePartialToString") else encode(spans)

    encode_or_pass.lets_ready_batches_pass = True  # type: ignore[attr-defined]
    module.encode_spans = encode_or_pass  # type: ignore[attr-defined]


def _check_http_exporter(make: Callable[..., Any]) -> None:
    """Exports to a session that sends nothing."""
    requests = import_module("requests")
    session, sent_bodies = requests.Session(), []

    def send(request: Any, **options: Any) -> Any:
        sent_bodies.append(request.body)
        response = requests.Response()
        response.status_code = 200
        return response

    # `trust_env` off: no proxies and no .netrc are looked up.
    session.send, session.trust_env = send, False
    make = functools.partial(make, endpoint="http://rehearsal.invalid", session=session)
    _check_exporter("http", make, sent_bodies, "`export` calls no `encode_spans`, or takes no `session`")


def _check_grpc_exporter(module: ModuleType, compression: Any) -> None:
    """Exports to a stub that sends nothing. A channel connects only at its first call.

    `compression` is passed on, because the exporter accepts only gzip from the environment (SDK 1.45).
    """
    sent_bodies: list[bytes] = []

    class Stub:
        def Export(self, request: bytes, **options: Any) -> None:  # noqa: N802
            sent_bodies.append(request)

    make = functools.partial(_make_exporter_class(module, lambda channel: Stub()), insecure=True)
    make = functools.partial(make, endpoint="http://rehearsal.invalid", compression=compression)
    _check_exporter("grpc", make, sent_bodies, "`export` uses no `_translate_data`, or no `_stub`")


def _check_exporter(protocol: str, make: Callable[[], Any], sent_bodies: list[bytes], missing: str) -> None:
    try:
        exporter = make()
        exporter.export(EncodedBatch(_TEST_BODY, 0))
        exporter.shutdown()
    except Exception as error:
        raise _make_incompatible_error(protocol, f"{missing} ({type(error).__name__}: {error})") from error
    if sent_bodies != [_TEST_BODY]:
        raise _make_incompatible_error(protocol, missing)


def _import_exporter(protocol: str) -> ModuleType:
    try:
        return import_module(f"opentelemetry.exporter.otlp.proto.{protocol}.trace_exporter")
    except ImportError as error:
        raise ImportError(
            f"sending OTLP over {protocol} needs {_package_of_protocol(protocol)}: {error}"
        ) from error


def _package_of_protocol(protocol: str) -> str:
    return f"opentelemetry-exporter-otlp-proto-{protocol}"


def _make_incompatible_error(protocol: str, missing: str) -> IncompatibleSdk:
    try:
        release = metadata.version(_package_of_protocol(protocol))
    except metadata.PackageNotFoundError:
        release = "(release unknown)"
    return IncompatibleSdk(f"{_package_of_protocol(protocol)} {release} cannot send encoded bytes: {missing}")
