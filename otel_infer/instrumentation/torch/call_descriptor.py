"""The class attribute through which calls of outermost modules are traced, compiled where that was built.

    model(...) ─▶ get_call ─▶ forward._call_traced        compiled (`_forward.c`): the usual case of both

Dynamo traces `get_call`, which is in the `__dict__` of the class. The interpreter calls the compiled function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

from opentelemetry.context import Context

from otel_infer.gpu.timing import timing
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.hooks.suppression import torch_suppressed
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.native import native
from otel_infer.ringbuffer.recorder import CHECK_NS, recorder
from otel_infer.tracing import context, request_span
from otel_infer.tracing.request_span import REQUEST_KEY
from otel_infer.tracing.span_ids import LazySpanIds, RemoteParent

CALL_ATTRIBUTE = "_compiled_call_impl"


class ModelNames(NamedTuple):
    """Operation, provider and model of the requests that a module serves, and the name of their span."""

    operation: tuple[str, str, str]
    span: str


class PythonCallState:
    """The fields that compiled code reads as well."""

    hook: Hook
    compiler: Any
    tensor: Any
    is_grad_enabled: Callable[[], bool]
    is_tracing: Callable[[], bool]


is_compiled = native is not None and context.variable is not None
if TYPE_CHECKING or not is_compiled:
    CallState = PythonCallState
else:
    CallState = native.CallDescriptor


class CallDescriptor(CallState):
    """The class attribute in place of `_compiled_call_impl`. Outermost modules get a traced call from it.

    A module's own value (after `Module.compile`) stays in its `__dict__`, where torch keeps it.
    """

    is_dynamo_compiling: Callable[[], bool]

    def __init__(self, outermost: dict[int, Any], call_traced: Callable[..., Any]) -> None:
        """`outermost`: the ids of the outermost modules. `call_traced`: calls a module as a stage."""
        self.hook, self.outermost, self.call_traced = Hook(""), outermost, call_traced

    def bind_torch_functions(self) -> None:
        """Stores the functions of torch that report compiling, tracing and gradients."""
        import torch

        self.compiler, self.tensor = torch.compiler, torch.Tensor
        self.is_dynamo_compiling = torch.compiler.is_dynamo_compiling
        self.is_tracing = getattr(
            torch._C, "_is_tracing", torch.jit.is_tracing
        )  # the latter calls the former
        self.is_grad_enabled = torch.is_grad_enabled

    def connect_compiled(
        self,
        model_names: dict[int, ModelNames],
        stage: str,
        owner: str,
        end_failed: Callable[..., None],
        read_batch_size: Callable[..., int],
    ) -> None:
        """Stores what compiled code needs, where it was built."""
        if not is_compiled:
            return
        connect: Any = getattr(self, "connect")  # noqa: B009  (of the compiled base)
        connect(
            self.outermost,
            model_names,
            timing,
            stage,
            owner,
            events.NON_GENERATIVE,
            (request_span.RequestSpan, Context, REQUEST_KEY, context.SPAN_KEY, _make_identity),
            (context.variable.get, context.variable.set, context.variable.reset),
            request_span.thread_owner.get,
            (torch_suppressed.get, torch_suppressed.set, torch_suppressed.reset),
            (self.call_traced, end_failed, read_batch_size, recorder.run_deferred_recorders),
            MethodType,
        )

    def renew_separate_requests(self) -> None:
        """Lets compiled code open separate requests, until the recorder is due for maintenance."""
        factory, writer = request_span.span_factory, recorder.requests
        if is_compiled and factory is not None and writer is not None and recorder.active:
            sampler = factory.plain_sampler
            if sampler is not None and writer.compiled is not None:
                renew: Any = getattr(self, "renew")  # noqa: B009
                renew(writer.compiled, recorder.maintained_at + CHECK_NS, sampler.root_sampled)

    def __set__(self, module: Any, value: Any) -> None:
        module.__dict__[CALL_ATTRIBUTE] = value

    def __delete__(self, module: Any) -> None:
        module.__dict__.pop(CALL_ATTRIBUTE, None)

    def __reduce__(self) -> Any:
        # cloudpickle pickles classes of `__main__` by value. Elsewhere this becomes None, torch's default.
        return type(None), ()


def get_call(self: CallDescriptor, module: Any, owner: Any = None) -> Any:
    """Returns the traced call of an outermost module; of another module, its own value."""
    if module is None:
        return None
    # `is_dynamo_compiling` is first: under torch.compile it is a constant, and dynamo skips the rest. With
    # the flag it is `torch.compiler.is_compiling`, which is two calls.
    if (
        self.is_dynamo_compiling()
        or self.compiler._is_compiling_flag
        or torch_suppressed.get()
        or id(module) not in self.outermost
        or not self.hook.alive
    ):
        return module.__dict__.get(CALL_ATTRIBUTE)
    return MethodType(self.call_traced, module)


def _make_identity(ids: tuple[bytes, bytes, bytes, bytes], flags: int, _above: RemoteParent) -> LazySpanIds:
    return LazySpanIds(ids, flags, False)


if is_compiled:
    CallDescriptor.show_get(get_call)  # type: ignore[attr-defined]
else:
    CallDescriptor.__get__ = get_call  # type: ignore[attr-defined]


def read_batch_size(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Returns the batch size: the length of the first tensor of two or more dimensions; 0 = there is none."""
    for value in (*args, *kwargs.values()):
        for tensor in value.values() if isinstance(value, Mapping) else (value,):
            try:
                shape = tensor.shape
            except Exception:  # no tensor, or an object of the application whose `shape` property raises
                continue
            if isinstance(shape, tuple) and len(shape) >= 2:
                return int(shape[0])
    return 0
