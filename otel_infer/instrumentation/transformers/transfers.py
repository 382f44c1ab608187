"""Hooks that record separate calls for copies to and from a device, as the stages `h2d` and `d2h`.

`BatchEncoding.to` moves the inputs of a request. Asynchronous batching moves the inputs of a step to the
device, and the chosen tokens back. These stages are recorded only for a request whose prompt is in the batch,
not for every token.

By the host's clock a stage lasts as long as the call, by the device's clock as long as the copy. The copy may
begin after the call returns, because batching copies on separate streams from page-locked memory. The bytes
of a step are the buffers that `ContinuousBatchingIOs._transfer_inputs` copies whole (transformers 5.5 to
5.23).
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
from otel_infer.tracing import request_span, start


@dataclass(frozen=True)
class _DeviceRef:
    """A device with the attributes of a `torch.device`."""

    type: str
    index: int


class _Transfer:
    """A transfer that begins now, for these requests.

    `stream`: None = the current stream of the device `on`. `has_stream`: False if the stream is unknown; then
    only the host's clock times the transfer.
    """

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
        """Drops the device timing of a transfer that did not happen."""
        timing.cancel(self._timing_handle)

    def record_end(self, tensors: Iterable[Any], has_device: bool = True) -> None:
        """Records that copies of these tensors are launched.

        `has_device`: False leaves it unknown whether the memory is page-locked, because that query makes
        torch look for a device.
        """
        timing.end(
            self._timing_handle, StageWork(self._stage, *[request.handle for request in self._requests])
        )
        at, copied = _clock.now(), list(tensors)
        size = sum([tensor.nbytes for tensor in copied])
        pinned = all(tensor.is_pinned() for tensor in copied) if has_device else events.PINNED_UNKNOWN
        for request in self._requests:
            request.record_event(events.BytesMoved(at, self._started_at, self._stage, size, int(pinned)))


@instrumentor.patch_function(
    "transformers.tokenization_utils_base:BatchEncoding.to", reads=("device",), part="tokenizer"
)
def trace_to_device(call: Call) -> Generator[None, Any, None]:
    """Records the transfer of a request's inputs; nothing if no tensor leaves the host."""
    request, target = start.current_request(), call["device"]
    leaves_host = request is not None and not str(target).startswith("cpu")
    before = (
        {name: value for name, value in call.instance.items() if _is_on_host(value)} if leaves_host else {}
    )
    if request is None or not before:
        yield
        return
    device = _resolve_device(target)
    transfer = _Transfer("h2d", [request], has_stream=device is not None, on=device)
    try:
        yield
    except BaseException:
        transfer.cancel_timing()
        raise
    moved = [value for name, value in before.items() if not _is_on_host(call.instance.get(name))]
    transfer.record_end(moved) if moved else transfer.cancel_timing()


def _is_on_host(value: Any) -> bool:
    return getattr(getattr(value, "device", None), "type", "") == "cpu"


def _resolve_device(target: Any) -> _DeviceRef | None:
    """Returns the device that `target` names, if it is this thread's current device; else None."""
    device = current_device()
    if device is None or str(target) not in (
        device.kind,
        str(device.index),
        f"{device.kind}:{device.index}",
    ):
        return None
    return _DeviceRef(device.kind, device.index)


def _make_transfer_wrapper(
    stage: str, iter_tensors: Callable[[Any], Iterator[Any]]
) -> Callable[[Callable[..., Any], Hook], Callable[..., Any]]:
    def wrap_transfer(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
        def transfer_buffers(self: Any, stream: Any) -> Any:
            transfer = None
            if hook.alive:
                try:
                    transfer = _begin_transfer(stage, self.host_io, stream)
                except Exception as exc:
                    hook.mark_failed(exc)
            if transfer is None:
                return original(self, stream)
            try:
                result = original(self, stream)
            except BaseException:
                transfer.cancel_timing()
                raise
            try:
                transfer.record_end(iter_tensors(self.host_io), stream is not None)
            except Exception as exc:
                hook.mark_failed(exc)
            return result

        return transfer_buffers

    return wrap_transfer


def _begin_transfer(stage: str, host: Any, stream: Any) -> _Transfer | None:
    """Begins a transfer for the requests with more than one token in the batch; None if there is none."""
    futures = host.requests_in_batch
    if host.total_seqlen_q <= len(futures):
        return None
    edges = host.cumulative_seqlens_q[: len(futures) + 1].tolist()
    groups = [
        getattr(future.state, "otel_infer", None)
        for future, first, end in zip(futures, edges, edges[1:])
        if end - first > 1
    ]
    requests = list(dict.fromkeys([group.request for group in groups if group is not None]))
    return _Transfer(stage, requests, stream) if requests else None


def _iter_input_tensors(host: Any) -> Iterator[Any]:
    unread = not hasattr(host, "logits_processors_defaults")  # 5.5 also copies indices that it does not read
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


for _name, _stage, _iter_tensors in (
    ("transfer_inputs_h2d", "h2d", _iter_input_tensors),
    ("transfer_outputs_d2h", "d2h", _iter_output_tensors),
):
    instrumentor.patch_hot_path(
        f"{CB}.input_outputs:HostDeviceIOPair.{_name}", reads=("stream",), part="transfers"
    )(_make_transfer_wrapper(_stage, _iter_tensors))
