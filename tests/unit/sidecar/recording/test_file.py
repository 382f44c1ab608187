"""Tape files: every event type is read back unchanged, up to the end of the file."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from otel_infer.ringbuffer import events
from otel_infer.sidecar.recording import event_parser, file
from otel_infer.sidecar.recording.file import EventBatch, InvalidRecording, RecordingWriter

EVENT_TYPES = [
    event_type
    for name, event_type in vars(events).items()
    if isinstance(event_type, type)
    and hasattr(event_type, "_fields")
    and name not in ("EventLayout", "RecordedEvent")
]
text = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=12)
number = st.integers(-(1 << 63), (1 << 64) - 1)
value = st.one_of(
    text,
    st.booleans(),
    st.integers(-(1 << 63), (1 << 63) - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.lists(text, max_size=3),
)


def field_values(field_type: Any) -> st.SearchStrategy[Any]:
    """Returns a strategy for the values of a field; sequences are lists, as in JSON."""
    strategies = {int: number, bytes: st.binary(max_size=16), str: text, bool: st.booleans()}
    if field_type in strategies:
        return strategies[field_type]
    shape = str(field_type)
    if "Mapping" in shape:
        return st.dictionaries(st.one_of(text, st.just("hex")), value, max_size=3)
    if "tuple" in shape:
        return st.lists(st.tuples(number, number), max_size=3).map(tuple)
    if field_type == get_type_hints(events.AttributeSet)["value"]:
        return value
    return st.lists(number, max_size=3).map(tuple)


instant = st.integers(0, (1 << 62) - 1)
any_event = st.one_of(
    *(
        st.builds(
            event_type,
            **{
                name: instant
                if name == "at"
                else st.integers(0, 1 << 20)
                if name == "size"
                else field_values(kind)
                for name, kind in get_type_hints(event_type).items()
            },
        )
        for event_type in EVENT_TYPES
    )
)
event_lists = st.lists(
    st.builds(events.RecordedEvent, st.integers(0, 99), st.integers(0, (1 << 32) - 1), any_event), max_size=8
)
batch_lists = st.lists(st.builds(EventBatch, event_lists, st.integers(0, 1 << 60)), max_size=5)


def write_tape(path: Path, batches: list[EventBatch]) -> Path:
    writer = RecordingWriter(path, engine="toy 1.2")
    for recorded_events, horizon in batches:
        writer.write(recorded_events, horizon)
    writer.close()
    return path


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tapes") / "a.tape"


@settings(max_examples=150)
@given(batches=batch_lists)
def test_batches_are_read_back_unchanged(batches: list[EventBatch], path: Path) -> None:
    assert list(file.read_batches(write_tape(path, batches))) == batches


def test_every_event_type_is_supported() -> None:
    assert set(events.EVENT_TYPES) == set(EVENT_TYPES) and len(events.EVENT_TYPES) == len(EVENT_TYPES)
    assert {event_type.__name__ for event_type in EVENT_TYPES} == set(event_parser.TYPES_BY_NAME)
    assert {events.RequestArrived, events.StepDone, events.HttpDescribed, events.LiveListed} <= set(
        EVENT_TYPES
    )


def test_a_tape_is_gzipped_json_lines(path: Path) -> None:
    recorded = events.RecordedEvent(1, 7, events.SpanLinked(5, b"\x01" * 16, b"\x02" * 8))
    write_tape(path, [EventBatch([recorded], 9)])
    lines = [json.loads(line) for line in gzip.open(path, "rt")]
    assert lines == [
        {"otel_infer tape": 1, "engine": "toy 1.2"},
        [1, 7, "SpanLinked", 5, {"hex": "01" * 16}, {"hex": "02" * 8}],
        ["@", 9],
    ]


def test_values_unknown_to_json_are_stored_as_text(path: Path) -> None:
    recorded = events.RecordedEvent(1, 7, events.AttributeSet(5, "key", {1, 2}))  # type: ignore[arg-type]
    ((recorded_events, _),) = file.read_batches(write_tape(path, [EventBatch([recorded], 9)]))
    assert recorded_events[0].event.value == "{1, 2}"


def test_nan_and_infinity_are_stored_as_text(path: Path) -> None:
    recorded_events = [
        events.RecordedEvent(1, 7, events.AttributeSet(5, "a", float("nan"))),
        events.RecordedEvent(1, 7, events.AttributeSet(5, "b", [1.5, float("-inf")])),
        events.RecordedEvent(1, 7, events.SpanEventAdded(5, "c", {"d": float("inf"), "e": 2})),
    ]
    write_tape(path, [EventBatch(recorded_events, 9)])

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    lines = [json.loads(line, parse_constant=refuse) for line in gzip.open(path, "rt")]
    assert [line[-1] for line in lines[1:4]] == ["nan", [1.5, "-inf"], {"d": "inf", "e": 2}]


def test_a_tape_header_holds_the_start_of_coverage(
    path: Path,
) -> None:
    """0: from the start of the server."""
    for header, began_at in (({}, 0), ({"began_at": 7}, 7), ({"began_at": "x"}, 0)):
        RecordingWriter(path, **header).close()  # type: ignore[arg-type]
        assert file.read_began_at(path) == began_at


def test_a_tape_is_readable_up_to_last_sync(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    batches, writer = make_batches(3), RecordingWriter(path)
    for batch in batches[:2]:
        writer.write(*batch)
    writer.sync_if_due(file.SYNC_NS)
    writer.write(*batches[2])
    writer.sync_if_due(2 * file.SYNC_NS - 1)
    assert list(file.read_batches(path)) == batches[:2]
    assert str(path) in caplog.text
    writer.sync_if_due(2 * file.SYNC_NS)
    assert list(file.read_batches(path)) == batches
    size = path.stat().st_size
    writer.sync_if_due(9 * file.SYNC_NS)
    assert path.stat().st_size == size  # there was nothing to sync
    writer.close()
    caplog.clear()
    assert list(file.read_batches(path)) == batches
    assert caplog.text == ""


def test_a_full_disk_still_closes_the_file(path: Path) -> None:
    writer = RecordingWriter(path)
    writer.close()
    writer._raw = raw = open("/dev/full", "wb")
    writer._file = gzip.open(raw, "wt", encoding="utf-8")
    writer.write(*make_batches(1)[0])
    with pytest.raises(OSError, match="No space left"):
        writer.close()
    assert raw.closed


# ── damaged tapes ────────────────────────────────────────────────────────────────────────────────────────────────


def make_batches(count: int) -> list[EventBatch]:
    return [
        EventBatch(
            [events.RecordedEvent(1, number, events.RequestReceived(number * 7919 % 1000 + number))], number
        )
        for number in range(count)
    ]


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9, 0.999])
def test_a_truncated_tape_is_read_until_cut(share: float, path: Path) -> None:
    batches = make_batches(20_000)
    whole = write_tape(path, batches).read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    found = [recorded for batch in file.read_batches(path) for recorded in batch.recorded_events]
    expected = [recorded for batch in batches for recorded in batch.recorded_events]
    assert found == expected[: len(found)]
    assert len(found) > 0.5 * share * len(expected)


def test_events_without_a_horizon_use_their_latest_time(path: Path) -> None:
    lines = [
        '{"otel_infer tape": 1}',
        '[1, 7, "RequestReceived", 5]',
        '[1, 7, "TokenReached", 4]',
    ]
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    (batch,) = file.read_batches(path)
    assert batch.horizon == 5


def invalid_bodies() -> Iterator[tuple[str, bytes, str]]:
    head = '{"otel_infer tape": 1}\n'
    yield "not compressed", b"hello", "not a tape"
    yield "empty", gzip.compress(b""), "format 1"
    yield "another format", gzip.compress(b'{"otel_infer tape": 2}\n'), "format 1"
    yield "no JSON", gzip.compress(b"hello\n"), "not a tape"
    yield "other JSON", gzip.compress(b"[1]\n"), "format 1"
    for line, reason in (
        ('[1, 7, "RequestDreamt", 5]', "'RequestDreamt' with 1 fields"),
        ('[1, 7, "TokenReached", 5, 6]', "'TokenReached' with 2 fields"),
        ('[1, 7, "SpanLinked", 5, "01", "02"]', "damaged"),
        ('[1, 7, "SpanLinked", 5, {"hex": "zz"}, {"hex": "02"}]', "damaged"),
        ('[1, 7, "SpanLinked", 5, {}, {"hex": "02"}]', "damaged"),
        ("[1]", "damaged"),
        ("7", "damaged"),
        ('["@"]', "damaged"),
        ("{", "damaged"),
        ("[]", "damaged"),
    ):
        yield line, gzip.compress((head + line + "\n").encode()), reason
    damaged = bytearray(gzip.compress((head + "\n".join(f"[1, 7, {i}]" for i in range(9999))).encode()))
    damaged[200:300] = bytes(100)
    yield "damaged in the middle", bytes(damaged), "damaged"


@pytest.mark.parametrize(("body", "reason"), [pytest.param(b, r, id=name) for name, b, r in invalid_bodies()])
def test_an_invalid_tape_is_rejected_with_its_path(body: bytes, reason: str, path: Path) -> None:
    path.write_bytes(body)
    with pytest.raises(InvalidRecording) as rejected:
        list(file.read_batches(path))
    assert str(rejected.value).startswith(f"{path}: ")
    assert reason in str(rejected.value)
    assert str(rejected.value).count(str(path)) == 1


def test_a_missing_file_is_named_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidRecording, match=r"none\.tape"):
        list(file.read_batches(tmp_path / "none.tape"))


def test_earlier_tapes_are_renamed_and_private(tmp_path: Path) -> None:
    path = tmp_path / "t.tape"
    for number in range(3):
        RecordingWriter(file.rotate_tape(path), number=number).close()
    assert {tape.name: file.read_header(tape)["number"] for tape in tmp_path.iterdir()} == {
        "t.1.tape": 0, "t.2.tape": 1, "t.tape": 2,
    }  # fmt: skip
    assert path.stat().st_mode & 0o777 == 0o600


def test_texts_of_a_tape_do_not_control_a_terminal(path: Path) -> None:
    ids = bytes(16)
    arrived = events.RequestArrived(
        1, 1, ids, ids[:8], ids[:8], ids[:8], 1, "chat\x1b[2J", "toy", "m\x9b31m", "POST"
    )
    noted = events.AttributeSet(2, "k\x07", ["two\nlines", "\x1b]0;title\x07"])
    write_tape(
        path, [EventBatch([events.RecordedEvent(1, 1, arrived), events.RecordedEvent(1, 1, noted)], 9)]
    )
    (batch,) = file.read_batches(path)
    read, attribute = (recorded.event for recorded in batch.recorded_events)
    assert (read.operation, read.model) == ("chat?[2J", "m?31m")
    assert (attribute.key, attribute.value) == ("k?", ["two\nlines", "?]0;title?"])


def test_a_tape_that_unpacks_to_far_more_is_cut(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with gzip.open(path, "wt", encoding="utf-8") as lines:
        lines.write(json.dumps({"otel_infer tape": file.FORMAT}) + "\n")
        for number in range(20):
            lines.write(json.dumps(["@", number, "a" * (1 << 20)]) + "\n")
    assert path.stat().st_size < 1 << 16
    assert len(list(file.read_batches(path))) < file.MIN_LIMIT >> 20
    assert "far more than a tape" in caplog.text
