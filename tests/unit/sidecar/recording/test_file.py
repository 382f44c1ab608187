"""A tape gives back what was said: every kind of fact, whatever is in it, as far as the file goes."""

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
from otel_infer.sidecar.recording import file
from otel_infer.sidecar.recording.file import EventBatch, InvalidRecording, RecordingWriter

KINDS = [
    fact
    for name, fact in vars(events).items()
    if isinstance(fact, type) and hasattr(fact, "_fields") and name not in ("EventLayout", "RecordedEvent")
]
text = st.text(st.characters(exclude_categories=()), max_size=12)
number = st.integers(-(1 << 63), (1 << 64) - 1)
value = st.one_of(
    text, st.booleans(), number, st.floats(allow_nan=False, allow_infinity=False), st.lists(text, max_size=3)
)


def of(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a field; sequences as JSON gives them back."""
    known = {int: number, bytes: st.binary(max_size=16), str: text, bool: st.booleans()}
    if kind in known:
        return known[kind]
    shape = str(kind)
    if "Mapping" in shape:
        return st.dictionaries(st.one_of(text, st.just("hex")), value, max_size=3)
    if "tuple" in shape:
        return st.lists(st.lists(number, min_size=2, max_size=2), max_size=3)
    return value if kind == get_type_hints(events.AttributeSet)["value"] else st.lists(number, max_size=3)


some_fact = st.one_of(*(st.builds(kind, *map(of, get_type_hints(kind).values())) for kind in KINDS))
some_facts = st.lists(
    st.builds(events.RecordedEvent, st.integers(0, 99), st.integers(0, (1 << 32) - 1), some_fact), max_size=8
)
passages = st.lists(st.builds(EventBatch, some_facts, st.integers(0, 1 << 60)), max_size=5)


def written(path: Path, told: list[EventBatch]) -> Path:
    writer = RecordingWriter(path, engine="toy 1.2")
    for said, horizon in told:
        writer.write(said, horizon)
    writer.close()
    return path


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tapes") / "a.tape"


@settings(max_examples=150)
@given(told=passages)
def test_what_was_said_is_read_back_as_it_was(told: list[EventBatch], path: Path) -> None:
    assert list(file.read_batches(written(path, told))) == told


def test_every_kind_of_fact_is_known() -> None:
    assert {kind.__name__ for kind in KINDS} == set(file._TYPES_BY_NAME)
    assert {events.RequestArrived, events.StepDone, events.HttpDescribed, events.LiveListed} <= set(KINDS)


def test_it_can_be_read_without_us(path: Path) -> None:
    said = events.RecordedEvent(1, 7, events.SpanLinked(5, b"\x01" * 16, b"\x02" * 8))
    written(path, [EventBatch([said], 9)])
    lines = [json.loads(line) for line in gzip.open(path, "rt")]
    assert lines == [
        {"otel_infer tape": 1, "engine": "toy 1.2"},
        [1, 7, "SpanLinked", 5, {"hex": "01" * 16}, {"hex": "02" * 8}],
        ["@", 9],
    ]


def test_what_json_cannot_say_is_said_by_its_text(path: Path) -> None:
    said = events.RecordedEvent(1, 7, events.AttributeSet(5, "key", {1, 2}))  # type: ignore[arg-type]
    ((passage, _),) = file.read_batches(written(path, [EventBatch([said], 9)]))
    assert passage[0].event.value == "{1, 2}"


def test_numbers_that_json_does_not_have_are_said_by_their_text(path: Path) -> None:
    said = [
        events.RecordedEvent(1, 7, events.AttributeSet(5, "a", float("nan"))),
        events.RecordedEvent(1, 7, events.AttributeSet(5, "b", [1.5, float("-inf")])),
        events.RecordedEvent(1, 7, events.SpanEventAdded(5, "c", {"d": float("inf"), "e": 2})),
    ]
    written(path, [EventBatch(said, 9)])

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    lines = [json.loads(line, parse_constant=refuse) for line in gzip.open(path, "rt")]
    assert [line[-1] for line in lines[1:4]] == ["nan", [1.5, "-inf"], {"d": "inf", "e": 2}]


def test_a_tape_says_from_when_on_it_tells_everything_if_it_does_not_begin_with_its_server(
    path: Path,
) -> None:
    for about, began_at in (({}, 0), ({"began_at": 7}, 7), ({"began_at": "x"}, 0)):
        RecordingWriter(path, **about).close()  # type: ignore[arg-type]
        assert file.read_began_at(path) == began_at


def test_whoever_is_killed_takes_only_what_was_written_last_along(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told, writer = many(3), RecordingWriter(path)
    for passage in told[:2]:
        writer.write(*passage)
    writer.sync_if_due(file.SYNC_NS)
    writer.write(*told[2])
    writer.sync_if_due(2 * file.SYNC_NS - 1)
    assert list(file.read_batches(path)) == told[:2]
    assert f"{path}: its end is missing" in caplog.text
    writer.sync_if_due(2 * file.SYNC_NS)
    assert list(file.read_batches(path)) == told
    size = path.stat().st_size
    writer.sync_if_due(9 * file.SYNC_NS)
    assert path.stat().st_size == size  # nothing was written
    writer.close()
    caplog.clear()
    assert list(file.read_batches(path)) == told
    assert caplog.text == ""


def test_where_there_is_no_room_for_the_end_the_file_is_let_go_of_all_the_same(path: Path) -> None:
    writer = RecordingWriter(path)
    writer._raw.close()
    writer._raw = raw = open("/dev/full", "wb")
    writer._file = gzip.open(raw, "wt", encoding="utf-8")
    writer.write(*many(1)[0])
    with pytest.raises(OSError, match="No space left"):
        writer.close()
    assert raw.closed


# ── broken ones ──────────────────────────────────────────────────────────────────────────────────────────────────


def many(count: int) -> list[EventBatch]:
    return [
        EventBatch(
            [events.RecordedEvent(1, number, events.RequestReceived(number * 7919 % 1000 + number))], number
        )
        for number in range(count)
    ]


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9, 0.999])
def test_a_tape_whose_end_is_missing_is_read_as_far_as_it_goes(share: float, path: Path) -> None:
    told = many(20_000)
    whole = written(path, told).read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    found = [said for passage in file.read_batches(path) for said in passage.recorded_events]
    expected = [said for passage in told for said in passage.recorded_events]
    assert found == expected[: len(found)]
    assert len(found) > 0.5 * share * len(expected)


def test_facts_without_a_horizon_reach_as_far_as_the_last_of_them(path: Path) -> None:
    lines = [
        '{"otel_infer tape": 1}',
        '[1, 7, "RequestReceived", 5]',
        '[1, 7, "TokenReached", 4]',
    ]
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    (passage,) = file.read_batches(path)
    assert passage.horizon == 5


def bodies() -> Iterator[tuple[str, bytes, str]]:
    head = '{"otel_infer tape": 1}\n'
    yield "not compressed", b"hello", "damaged, or not a tape"
    yield "empty", gzip.compress(b""), "not an otel_infer tape of format 1"
    yield "another format", gzip.compress(b'{"otel_infer tape": 2}\n'), "not an otel_infer tape of format 1"
    yield "no JSON", gzip.compress(b"hello\n"), "damaged, or not a tape"
    yield "other JSON", gzip.compress(b"[1]\n"), "not an otel_infer tape of format 1"
    for line, reason in (
        ('[1, 7, "RequestDreamt", 5]', "'RequestDreamt' of 1 fields: recorded by another release"),
        ('[1, 7, "TokenReached", 5, 6]', "'TokenReached' of 2 fields: recorded by another release"),
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


@pytest.mark.parametrize(("body", "reason"), [pytest.param(b, r, id=name) for name, b, r in bodies()])
def test_what_is_no_tape_of_ours_is_said_to_be_none_and_why(body: bytes, reason: str, path: Path) -> None:
    path.write_bytes(body)
    with pytest.raises(InvalidRecording) as told:
        list(file.read_batches(path))
    assert str(told.value).startswith(f"{path}: ")
    assert reason in str(told.value)
    assert str(told.value).count(str(path)) == 1


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRecording, match=r"none\.tape"):
        list(file.read_batches(tmp_path / "none.tape"))


def test_what_a_sidecar_wrote_before_is_kept_beside_and_nobody_else_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "t.tape"
    for number in range(3):
        RecordingWriter(file.unused_path(path), number=number).close()
    assert {one.name: file.read_header(one)["number"] for one in tmp_path.iterdir()} == {
        "t.1.tape": 0, "t.2.tape": 1, "t.tape": 2,
    }  # fmt: skip
    assert path.stat().st_mode & 0o777 == 0o600
