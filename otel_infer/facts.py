"""What an integration may state: one class per fact, named noun + past verb, and its layout in shared memory.

The writer (`ring.write`, `ring.write_steps`) packs these layouts, the reader (`ring.read`) unpacks them, the assembler
consumes them; nobody else knows a byte. `at` is always the instant the fact is about, monotonic ns, and facts are ordered
by it.

Two families:

* request facts name one request by its `handle` (a slot of the live table and its generation, u32; 0 = unknown) and
  travel in fixed 64-byte cells of the request ring;
* step facts describe one engine step and its whole batch and travel as variable-length records of a step ring.

Long, since it is one table: a fact and its layout are read side by side.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Union

Value = Union[str, bool, int, float, Sequence[str], Sequence[bool], Sequence[int], Sequence[float]]
"""What OpenTelemetry allows as an attribute value."""

NONE = 0
"""String id of "not said"."""
OTHER = "_OTHER"
"""What stands for a string when the string table is full (the word of the OpenTelemetry conventions)."""

# Flags of RequestArrived.
SAMPLED = 1
REMOTE_PARENT = 2
OWN_SERVER_SPAN = 4
NON_GENERATIVE = 8
JOINED = 16
"""What arrives is a part of a request that arrived in another process, whose trace id and span id these are."""

# Phases of a start, and by what it is known that it is over.
WEIGHTS = "weights"
WARM_UP = "warm-up"
READY = "ready"
KV_EVICTION, EMPTY_STEP, DUMMY_BATCH = "kv_eviction", "empty_step", "dummy_batch"
"""Marks: a block of the prefix cache was given up, a step had nothing in it, a rank kept step with its peers."""
BY_LIFESPAN, BY_ENGINE, BY_REQUEST = "lifespan", "engine", "request"
TORCH = "torch"
"""The provider of models that no engine claims: named after their class, never by a caller."""

# Outcomes of RequestEnded.
OK = 0
ERROR = 1
ABORTED = 2


class RequestArrived(NamedTuple):
    """A request began; `wall_at` (unix ns) pairs with `at`. Ids are zero bytes where there is none."""

    at: int
    wall_at: int
    trace_id: bytes
    span_id: bytes
    parent_span_id: bytes
    server_span_id: bytes
    flags: int
    operation: str
    provider: str
    model: str
    name: str


class StageEnded(NamedTuple):
    """A named interval of a request, stated when it is over."""

    at: int
    started_at: int
    stage: str
    items: int


PINNED_UNKNOWN = 2


class BytesMoved(NamedTuple):
    """A stage that moved so many bytes to a device or from it, stated when it is over. `pinned`: whether the host's side of them
    was page-locked, 0 or 1, or `PINNED_UNKNOWN`."""

    at: int
    started_at: int
    stage: str
    size: int
    pinned: int


class CacheHeld(NamedTuple):
    """The request's own KV cache, which is nobody else's, took so many bytes."""

    at: int
    size: int


class RequestSubmitted(NamedTuple):
    """Handed over to the engine. `input_tokens`, `max_tokens`: 0 = not known. `sequences`: 0 = more of the same prompt."""

    at: int
    sequences: int
    input_tokens: int
    max_tokens: int
    engine: str


class RequestReceived(NamedTuple):
    """The engine's scheduler saw the request: what came before was a hidden queue."""

    at: int


class RequestScheduled(NamedTuple):
    """First scheduled, for engines whose steps are not recorded. With a step log this follows from the steps."""

    at: int


class RequestPreempted(NamedTuple):
    """Put back into the queue to free KV blocks. `kind`: `offload` (KV kept elsewhere) or `recompute`."""

    at: int
    kind: str


class PrefixRead(NamedTuple):
    """A prompt of so many tokens was looked up in the engine's prefix cache, and so many of them were there."""

    at: int
    tokens: int
    cached: int


class TokensDrafted(NamedTuple):
    """What was guessed ahead for a sequence while it was in the engine (speculative decoding), and how much was right."""

    at: int
    drafted: int
    accepted: int


class TokenReached(NamedTuple):
    """The first token reached the part of the server that talks to the reader (`at`), nearer to them than the step."""

    at: int


class FirstTokenSent(NamedTuple):
    """The first chunk with a token in it is about to be handed to the socket."""

    at: int


class ResponseStarted(NamedTuple):
    """The first byte of the response body is about to be handed to the socket."""

    at: int


class EngineFinished(NamedTuple):
    """The engine is done with one sequence. `reason`: stop, length, abort, error. Tokens: 0 = take them from steps."""

    at: int
    reason: str
    output_tokens: int


class RequestEnded(NamedTuple):
    """The last byte was handed over, or the request died. Lengths in ns; `status_code` 0 = no HTTP."""

    at: int
    outcome: int
    error_type: str
    status_code: int
    chunks: int
    send_wait_ns: int
    detokenize_ns: int


class ExchangeEnded(NamedTuple):
    """The end of an HTTP request with what else is known of it by then, in one cell: for the ring alone, `told_apart` by its
    reader. `http`: of `HTTP`, how it was asked for; and `WHOLE`."""

    at: int
    outcome: int
    error_type: str
    status_code: int
    chunks: int
    send_wait_ns: int
    detokenize_ns: int
    route: str
    http: int


class AttributeSet(NamedTuple):
    """User code set an attribute on the live request span (limits already honoured)."""

    at: int
    key: str
    value: Value


class EventAdded(NamedTuple):
    """User code added an event to the live request span."""

    at: int
    name: str
    attributes: Mapping[str, Value]


class SpanLinked(NamedTuple):
    """User code linked the live request span to another."""

    at: int
    trace_id: bytes
    span_id: bytes


class LinkDescribed(NamedTuple):
    """User code said so of the link that it has just added, to the span with this id (hex)."""

    at: int
    span_id: str
    attributes: Mapping[str, Value]


class NameUpdated(NamedTuple):
    """User code renamed the live request span."""

    at: int
    name: str


class StateCarried(NamedTuple):
    """What the `tracestate` of the request says of its sampling, if anything."""

    at: int
    tracestate: str


class SpanUnseen(NamedTuple):
    """Nobody was told the id of the request's span, and nobody will be: nothing can hang from it."""

    at: int


class HttpDescribed(NamedTuple):
    """What an HTTP request is, in words of ours: a known method, the scheme, the route's template ("" = no route)."""

    at: int
    method: str
    scheme: str
    route: str


METHODS = (OTHER, "POST", "PUT", "PATCH", "QUERY")
"""Of the requests that are watched."""
SCHEMES = ("", "http", "https")
_ASKED = tuple((method, scheme) for method in METHODS for scheme in SCHEMES)
HTTP: Mapping[tuple[str, str], int] = {asked: 2 * number for number, asked in enumerate(_ASKED, 1)}
"""Method and scheme as one number."""
WHOLE = 1
"""The body of the response was one piece: it was started `send_wait_ns` before the end."""


class HooksReported(NamedTuple):
    """How many hooks of one integration are bound in this process."""

    at: int
    integration: str
    active: int
    total: int


class PauseSeen(NamedTuple):
    """Something held up this process, whatever request it was at, from `started_at` to `at`. `cause`: gc, compile, …"""

    at: int
    started_at: int
    cause: str


class MarkSeen(NamedTuple):
    """Something happened so many times in this process between `since` and `at`; how long it took, nobody knows."""

    at: int
    since: int
    mark: str
    times: int


class ProcessStarted(NamedTuple):
    """This process began, as its system says; `wall_at` (unix ns) pairs with `at`. The ids are those of its start's trace.

    `parent_span_id`: of the start that this one is a part of; zeros if it is nobody's.
    """

    at: int
    wall_at: int
    trace_id: bytes
    span_id: bytes
    parent_span_id: bytes = bytes(8)


class ModuleImported(NamedTuple):
    """A module that we wait for was imported, at `at` or before."""

    at: int
    module: str


class PhaseBegan(NamedTuple):
    """The process began with something that it does before it serves: `weights`, `warm-up`, `ready`."""

    at: int
    phase: str


class PhaseEnded(NamedTuple):
    """It is over; `error_type` says of what it failed. `by`: the engine that loaded, or who says that the server is ready."""

    at: int
    started_at: int
    phase: str
    by: str
    model: str
    error_type: str


class ProcessLeft(NamedTuple):
    """The process is about to end in an orderly way, with an exception that nobody caught if `error_type` names one."""

    at: int
    error_type: str


class StepScheduled(NamedTuple):
    """A batch was composed. `members` is the ordered batch as handles; only its change travels.

    `left` (positions, each in the batch as earlier removals left it) and `joined` (handles, at the end) turn the
    previous batch into this one; `keyframe` says that `joined` is the whole batch. `tokens` holds (position, tokens) of the members whose scheduled tokens are not 1.
    KV numbers are blocks, 0 of 0 = not known; `waiting` counts requests the scheduler knows and has not scheduled.
    """

    at: int
    step: int
    keyframe: bool
    size: int
    left: Sequence[int]
    joined: Sequence[int]
    tokens: Sequence[tuple[int, int]]
    kv_used: int
    kv_total: int
    running: int
    waiting: int


class StepDone(NamedTuple):
    """The tokens of a step are known to the engine.

    Every member got one token, but for `delivered`: (position, tokens), 0 tokens = a chunk of a prefill or a discard.
    `discarded` counts sequences whose result was thrown away.
    """

    at: int
    step: int
    delivered: Sequence[tuple[int, int]]
    discarded: int


class StepExecuted(NamedTuple):
    """A worker did its part of a step of an engine, whose process it says, by its host's clock.

    `rank`: which of the workers it is. `log`: number of the engine's step ring among those of that process; 0 = the only one.
    """

    at: int
    started_at: int
    engine: str
    pid: int
    rank: int
    step: int
    log: int = 0


class StepTimed(NamedTuple):
    """The same by the device: from `started_at` to `at` on the host's clock, each within `bound_ns`.

    Lengths in ns: `launched_ns` the host took to launch it, `queued_ns` from then until the device came to it, `gap_ns` the device
    had nothing to do on that stream before it (`UNKNOWN_NS` where the first or the last is not known). Longer than 4 s is said to be 4 s.
    """

    at: int
    started_at: int
    engine: str
    pid: int
    rank: int
    step: int
    log: int
    launched_ns: int
    queued_ns: int
    gap_ns: int
    bound_ns: int


class StageTimed(NamedTuple):
    """When the device was at what was launched in a stage of a request; as `StepTimed`."""

    at: int
    started_at: int
    stage: str
    launched_ns: int
    queued_ns: int
    bound_ns: int


class MemorySeen(NamedTuple):
    """Memory of a device that this process uses, bytes; the first four as torch's allocator has them, `free` and `total` as the
    driver does (0 of 0 = not asked). `private_pools`: of what is reserved, what CUDA graphs and pools of the application's own have
    to themselves; `pinned`: page-locked memory of the host's that torch's allocator holds in this process; -1 = this torch does
    not say. `uuid`: as NVML calls it."""

    at: int
    uuid: str
    allocated: int
    reserved: int
    active: int
    inactive_split: int
    free: int
    total: int
    private_pools: int
    pinned: int


class MemoryRefused(NamedTuple):
    """A device had no room for `wanted` bytes while the request was at work: of `limit` (the device's, or what torch was told to
    keep to), so many were `free`."""

    at: int
    wanted: int
    limit: int
    free: int


class WaitingSeen(NamedTuple):
    """So many requests wait in this process' scheduler for this reason: `capacity`, or what keeps them from being scheduled at all."""

    at: int
    reason: str
    requests: int


class BlocksSized(NamedTuple):
    """A block of this engine's KV cache holds so many tokens. `log`: as in `StepExecuted`."""

    at: int
    engine: str
    pid: int
    log: int
    tokens: int


LONGEST_NS, UNKNOWN_NS = (1 << 32) - 2, (1 << 32) - 1
"""Of those lengths."""


def told_ns(length: int) -> int:
    """A length as such a fact has it; below 0 = not known."""
    return UNKNOWN_NS if length < 0 else min(length, LONGEST_NS)


def known_ns(told: int) -> int:
    """And back."""
    return -1 if told == UNKNOWN_NS else told


class StepsLost(NamedTuple):
    """Said by the reader: facts of this step ring were overwritten or torn before `at`; wait for a keyframe."""

    at: int
    lost: int


class FactsLost(NamedTuple):
    """Said by the reader: facts of this process were overwritten (`lost`) or torn before `at`."""

    at: int
    lost: int
    torn: int


class ProcessSeen(NamedTuple):
    """Said by the reader: a process of the server, with what its header says. `parent`: the process id of its parent.

    `concluded_at`: what an earlier reader concluded before this instant is not to be concluded again; 0 = no such reader.
    """

    at: int
    pid: int
    role: str
    concluded_at: int
    parent: int = 0


class EngineSeen(NamedTuple):
    """Said by the reader: this ring, its process's number `log`, holds the steps of an engine in the process of ring `process`."""

    at: int
    process: int
    pid: int
    engine: str
    log: int = 0


class ThreadSeen(NamedTuple):
    """Said by the reader: what the kernel counted of an engine's thread in (`since`, `at`].

    `ran_ns` on a CPU, `waited_ns` for one while it could have run, `system_ns` in the kernel (in whole ticks); pages
    mapped to it one by one (`faults`).
    """

    at: int
    since: int
    ran_ns: int
    waited_ns: int
    system_ns: int
    faults: int


class ProcessDied(NamedTuple):
    """Said by the reader: a writer is gone, with whatever was in flight."""

    at: int


class LiveListed(NamedTuple):
    """Said by the reader after a loss: the handles in the live table; whatever else was open has ended unseen."""

    at: int
    live: Sequence[int]


class LiveRecovered(NamedTuple):
    """Said by the reader, from the live table: a request whose arrival was overwritten or happened before us."""

    at: int
    wall_at: int
    trace_id: bytes
    span_id: bytes
    parent_span_id: bytes
    flags: int


class RingFact(NamedTuple):
    """A fact with its origin: ring number (one process or engine), the request's handle (0 for steps)."""

    ring: int
    handle: int
    fact: Any


# ── request facts: layout ────────────────────────────────────────────────────────────────────────────────────────
# S in a layout below is a string id (u32) of the process's string table, T one where room is short (u16).


class Layout(NamedTuple):
    """How one fact lies in bytes: `struct` format of its fields, and which fields are string ids."""

    code: int
    fact: type
    packed: struct.Struct
    strings: tuple[int, ...]


def _layout(code: int, fact: type, fields: str) -> Layout:
    strings = tuple(i for i, f in enumerate(fields.split()) if f in "ST")
    packed = fields.replace("S", "I").replace("T", "H").replace(" ", "")
    return Layout(code, fact, struct.Struct("<" + packed), strings)


REQUEST_LAYOUTS: tuple[Layout, ...] = (
    _layout(1, RequestArrived, "q q 16s 8s 8s 8s H T T T T"),
    _layout(2, StageEnded, "q q S q"),
    _layout(3, RequestSubmitted, "q I I I S"),
    _layout(4, RequestReceived, "q"),
    _layout(5, RequestScheduled, "q"),
    _layout(6, RequestPreempted, "q S"),
    _layout(7, TokenReached, "q"),
    _layout(8, FirstTokenSent, "q"),
    _layout(9, ResponseStarted, "q"),
    _layout(10, EngineFinished, "q S I"),
    _layout(11, RequestEnded, "q H S H I q q"),
    _layout(12, SpanLinked, "q 16s 8s"),
    _layout(13, HooksReported, "q S H H"),
    _layout(14, HttpDescribed, "q S S S"),
    _layout(15, PauseSeen, "q q S"),
    _layout(16, SpanUnseen, "q"),
    _layout(17, MarkSeen, "q q S I"),
    _layout(18, ExchangeEnded, "q B S H I q q S B"),
    _layout(20, ProcessStarted, "q q 16s 8s 8s"),
    _layout(21, ModuleImported, "q S"),
    _layout(22, PhaseBegan, "q S"),
    _layout(23, PhaseEnded, "q q S S S S"),
    _layout(24, ProcessLeft, "q S"),
    _layout(25, PrefixRead, "q I I"),
    _layout(26, TokensDrafted, "q I I"),
    _layout(27, StepExecuted, "q q S I H Q H"),
    _layout(28, StepTimed, "q q S I H Q H I I I I"),
    _layout(29, StageTimed, "q q S I I I"),
    _layout(30, MemorySeen, "q S Q Q Q Q Q Q q q"),
    _layout(31, MemoryRefused, "q Q Q Q"),
    _layout(36, WaitingSeen, "q S I"),
    _layout(37, BytesMoved, "q q S q B"),
    _layout(38, CacheHeld, "q q"),
    _layout(39, BlocksSized, "q S I H I"),
)
BY_FACT: Mapping[type, Layout] = {layout.fact: layout for layout in REQUEST_LAYOUTS}
BY_CODE: Mapping[int, Layout] = {layout.code: layout for layout in REQUEST_LAYOUTS}

# Facts with free text (set by user code) travel as JSON and never through the string table.
TEXT_CODES: Mapping[type, int] = {
    AttributeSet: 32,
    EventAdded: 33,
    NameUpdated: 34,
    StateCarried: 35,
    LinkDescribed: 40,
}
_TEXT_FACTS: Mapping[int, Callable[..., Any]] = {code: fact for fact, code in TEXT_CODES.items()}


made: Callable[[type, Iterable[Any]], Any] = tuple.__new__
"""A named tuple of all its fields in order, in half the time."""

_encode = json.JSONEncoder(default=str, separators=(",", ":")).encode


def count(number: Any) -> int:
    """As many as fit into a field of a fact; 0 for what is no number."""
    if type(number) is int and 0 <= number <= 0xFFFFFFFF:
        return number
    try:
        return max(0, min(int(number), 0xFFFFFFFF))
    except Exception:  # it is the user's, and so is what it raises
        return 0


def pack_text(fact: AttributeSet | EventAdded | NameUpdated | StateCarried | LinkDescribed) -> bytes:
    """A free-text fact as bytes; what JSON cannot say is said by its `str`."""
    return _encode(fact).encode("utf-8", "replace")


def unpack_request(code: int, body: bytes, text_of: Callable[[int], str]) -> Any:
    """The request fact with this code in `body` (which may be longer); raises `ValueError` for what is not one."""
    if code in _TEXT_FACTS:
        said = _TEXT_FACTS[code](*json.loads(body.rstrip(b"\0")))
        if type(said.at) is not int:
            raise ValueError("an instant is a whole number of ns")
        return said
    layout = BY_CODE.get(code)
    if layout is None:
        raise ValueError(f"unknown fact code {code}")
    fields: Any = layout.packed.unpack_from(body)
    if layout.strings:
        fields = list(fields)
        for i in layout.strings:
            fields[i] = text_of(fields[i])
    return made(layout.fact, fields)


def told_apart(fact: Any) -> tuple[Any, ...]:
    """The facts that this one from a ring stands for, in order; nearly always itself."""
    if type(fact) is not ExchangeEnded:
        return (fact,)
    route, http = fact.route, fact.http
    said: list[Any] = []
    if http & WHOLE:
        said.append(ResponseStarted(fact.at - fact.send_wait_ns))
    if http > WHOLE:
        said.append(HttpDescribed(fact.at, *_ASKED[http // 2 - 1], route))
    return (*said, RequestEnded(*fact[:7]))


# ── step facts: layout ───────────────────────────────────────────────────────────────────────────────────────────
SCHEDULED_CODE = 1
DONE_CODE = 2


COLUMN = 0xFFFF
"""In place of a count of (position, tokens) pairs: a whole column follows, one u32 per member."""
SCHEDULED_HEAD = struct.Struct("<qQBxHHHIIIII")
"""at, step, keyframe, left, joined, tokens (counts), size, kv used, kv total, running, waiting."""
DONE_HEAD = struct.Struct("<qQHxxII")
"""at, step, delivered (count), size, discarded."""


def _exceptions(body: bytes, offset: int, count: int, size: int) -> tuple[tuple[int, int], ...]:
    """(position, tokens) of the members whose tokens are not 1, from pairs or from a whole column."""
    if count == COLUMN:
        column = _numbers(body, offset, size)
        return tuple((i, tokens) for i, tokens in enumerate(column) if tokens != 1)
    pairs = _numbers(body, offset, 2 * count)
    return tuple(zip(pairs[::2], pairs[1::2])) if pairs else ()


def _numbers(body: bytes, offset: int, count: int) -> tuple[int, ...]:
    return struct.unpack_from(f"<{count}I", body, offset) if count else ()


def unpack_step(code: int, body: bytes) -> StepScheduled | StepDone:
    """The step fact with this code in `body`; raises `ValueError` for what is not one."""
    if code == SCHEDULED_CODE:
        head = SCHEDULED_HEAD.unpack_from(body)
        at, step, keyframe, n_left, n_joined, n_tokens, size, used, total, running, waiting = head
        change = _numbers(body, SCHEDULED_HEAD.size, n_left + n_joined)
        tokens = _exceptions(body, SCHEDULED_HEAD.size + 4 * len(change), n_tokens, size) if n_tokens else ()
        left, joined = change[:n_left], change[n_left:]
        fields = at, step, bool(keyframe), size, left, joined, tokens, used, total, running, waiting
        return made(StepScheduled, fields)  # type: ignore[no-any-return]
    if code == DONE_CODE:
        at, step, count, size, discarded = DONE_HEAD.unpack_from(body)
        delivered = _exceptions(body, DONE_HEAD.size, count, size) if count else ()
        return made(StepDone, (at, step, delivered, discarded))  # type: ignore[no-any-return]
    raise ValueError(f"unknown step fact code {code}")
