"""What goes to a device and comes from it, where the library has calls for that alone: the stages `h2d` and `d2h`.

`BatchEncoding.to` takes a request's inputs there. Asynchronous batching moves those of a step, and what it chose; that is said of
a request whose prompt is in the batch, not of every token. By the host's clock a stage lasts as long as the call, by the
device's as long as the copy, which may begin when the call is over: batching copies on streams of its own, from page-locked
memory. The bytes of a step are those of the buffers that `ContinuousBatchingIOs._transfer_inputs` copies whole (transformers 5.5
to 5.23).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from otel_infer import _clock
from otel_infer.gpu.device import current_device
from otel_infer.gpu.timed_work import StageWork
from otel_infer.gpu.timing import UNTIMED, timing
from otel_infer.instrumentation.hooks.probe import Call, Hook
from otel_infer.instrumentation.transformers._instrumentor import instrumentor
from otel_infer.instrumentation.transformers.continuous_batching import CB
from otel_infer.ringbuffer import events
from otel_infer.tracing import request_span
from otel_infer.tracing import start as ingress


@dataclass(frozen=True)
class _DeviceRef:
    """A device as torch has it."""

    type: str
    index: int


class _Transfer:
    """One that begins, for these requests, on this stream (None: the current one of the device `on`), if on any that is known."""

    __slots__ = ("_requests", "_stage", "_started_at", "_timing_handle")

    def __init__(
        self,
        stage: str,
        requests: list[request_span.RequestSpan],
        stream: Any = None,
        has_stream: bool = True,
        on: _DeviceRef | None = None,
    ) -> None:
        self._stage, self._requests, self._started_at = stage, requests, _clock.now()
        self._timing_handle = timing.begin(stream, is_step=False, on=on) if has_stream else UNTIMED

    def cancel_timing(self) -> None:
        """It did not come to it."""
        timing.cancel(self._timing_handle)

    def record_end(self, tensors: Iterable[Any], has_device: bool = True) -> None:
        """These are on their way. Whoever asks whether memory is page-locked has a device looked for, so not without one."""
        timing.end(
            self._timing_handle, StageWork(self._stage, *[request.handle for request in self._requests])
        )
        at, moved = _clock.now(), list(tensors)
        size = sum([tensor.nbytes for tensor in moved])
        pinned = all(tensor.is_pinned() for tensor in moved) if has_device else events.PINNED_UNKNOWN
        for request in self._requests:
            request.record_event(events.BytesMoved(at, self._started_at, self._stage, size, int(pinned)))


@instrumentor.patch_function(
    "transformers.tokenization_utils_base:BatchEncoding.to", reads=("device",), part="tokenizer"
)
def trace_to_device(call: Call) -> Generator[None, Any, None]:
    """A request's inputs; what is there already stays, and what is no device changes nothing."""
    request, target = ingress.current_request(), call["device"]
    goes = request is not None and not str(target).startswith("cpu")
    before = {name: one for name, one in call.instance.items() if _is_on_host(one)} if goes else {}
    if request is None or not before:
        yield
        return
    on = _resolve_device(target)
    transfer = _Transfer("h2d", [request], has_stream=on is not None, on=on)
    try:
        yield
    except BaseException:
        transfer.cancel_timing()
        raise
    moved = [one for name, one in before.items() if not _is_on_host(call.instance.get(name))]
    transfer.record_end(moved) if moved else transfer.cancel_timing()


def _is_on_host(value: Any) -> bool:
    return getattr(getattr(value, "device", None), "type", "") == "cpu"


def _resolve_device(target: Any) -> _DeviceRef | None:
    """The device on whose current stream a copy to this target goes, if that is this thread's current one."""
    device = current_device()
    if device is None or str(target) not in (
        device.kind,
        str(device.index),
        f"{device.kind}:{device.index}",
    ):
        return None
    return _DeviceRef(device.kind, device.index)


def _make_transfer_wrapper(
    stage: str, moved: Callable[[Any], Iterator[Any]]
) -> Callable[[Callable[..., Any], Hook], Callable[..., Any]]:
    def wrap_transfer(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
        def transfer_buffers(self: Any, stream: Any) -> Any:
            begun = None
            if hook.alive:
                try:
                    begun = _begin_transfer(stage, self.host_io, stream)
                except Exception as exc:
                    hook.mark_failed(exc)
            if begun is None:
                return original(self, stream)
            try:
                result = original(self, stream)
            except BaseException:
                begun.cancel_timing()
                raise
            try:
                begun.record_end(moved(self.host_io), stream is not None)
            except Exception as exc:
                hook.mark_failed(exc)
            return result

        return transfer_buffers

    return wrap_transfer


def _begin_transfer(stage: str, host: Any, stream: Any) -> _Transfer | None:
    """For those of the batch that have more than one token in it; None where all have one."""
    futures = host.requests_in_batch
    if host.total_seqlen_q <= len(futures):
        return None
    edges = host.cumulative_seqlens_q[: len(futures) + 1].tolist()
    members = [
        getattr(future.state, "otel_infer", None)
        for future, start, end in zip(futures, edges, edges[1:])
        if end - start > 1
    ]
    requests = list(dict.fromkeys([sequences.request for sequences in members if sequences is not None]))
    return _Transfer(stage, requests, stream) if requests else None


def _iter_input_tensors(host: Any) -> Iterator[Any]:
    unread = not hasattr(host, "logits_processors_defaults")  # 5.5 moves indices also if nothing is read
    yield host._bulk_input_tensor
    if host.use_block_table:
        yield host.block_table
    else:
        yield host.write_index_storage
        if host.max_kv_read > 0 or unread:
            yield host.read_index_storage
    yield from (host.attention_mask or {}).values()


def _iter_output_tensors(host: Any) -> Iterator[Any]:
    yield host.output_ids


for _name, _stage, _moved in (
    ("transfer_inputs_h2d", "h2d", _iter_input_tensors),
    ("transfer_outputs_d2h", "d2h", _iter_output_tensors),
):
    instrumentor.patch_hot_path(
        f"{CB}.input_outputs:HostDeviceIOPair.{_name}", reads=("stream",), part="transfers"
    )(_make_transfer_wrapper(_stage, _moved))
