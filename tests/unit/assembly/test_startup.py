"""Startup of a process: its events, and the trace that is exported for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from otel_infer import semconv
from otel_infer.assembly.assembler import Assembler
from otel_infer.assembly.requests.ended_requests import GRACE_NS
from otel_infer.ringbuffer import events, layout
from otel_infer.sidecar.recording import file
from tests.support.starts import BEGUN, Starting, server
from tests.support.story import AFTER_ALL_EVENTS, PROCESS, ms, ns, render_spans, text


def test_start_is_one_trace_with_nested_phases() -> None:
    story = server()
    spans = story.start_spans()
    assert render_spans(spans) == text("""
        server start 0–9000
          imports 0–3000 · event infer.imported 900, event infer.imported 2000, event infer.imported 3000
          weights 3500–7000
          ready 7200–9000
          compile 7300–8300
          capture 8400–8900
    """)
    root, imports, weights, *_ = spans
    assert (bytes.fromhex(root["trace_id"]), bytes.fromhex(root["span_id"])) == BEGUN
    assert {span["trace_id"] for span in spans} == {root["trace_id"]}
    assert len({span["span_id"] for span in spans}) == len(spans)
    assert root["attributes"] == {semconv.PROCESS_PID: 77, semconv.READY_BY: "lifespan"}
    assert weights["attributes"] == {semconv.REQUEST_MODEL: "toy"}
    assert [event["attributes"][semconv.MODULE] for event in imports["events"]] == [
        "uvicorn", "torch", "transformers",
    ]  # fmt: skip


def test_idle_time_before_a_late_import_is_no_phase() -> None:
    """A worker that waits 20 s for its first job, which imports the library; then it loads a model."""
    story = Starting()
    story.imported(400, "uvicorn.config", since=300)
    story.imported(900, "starlette.applications", since=700)
    story.imported(22_000, "torch", since=20_900)
    story.imported(24_000, "transformers.generation.utils", since=22_500)
    story.loaded(24_100, 25_000)
    story.ready(25_000, 25_100)
    assert render_spans(story.start_spans()) == text("""
        server start 0–25100
          imports 0–900 · event infer.imported 400, event infer.imported 900
          imports 20900–24000 · event infer.imported 22000, event infer.imported 24000
          weights 24100–25000
          ready 25000–25100
    """)


def test_a_nested_import_is_part_of_the_outer_one() -> None:
    story = Starting()
    story.imported(6_000, "torch", since=4_000)
    story.imported(9_000, "transformers.generation.utils", since=3_000)
    story.ready(9_100, 9_200)
    (record,) = story.starts()
    assert [(phase.name, ms(phase.started_at), ms(phase.ended_at)) for phase in record.phases] == [
        ("imports", 3_000, 9_000), ("ready", 9_100, 9_200)
    ]  # fmt: skip


def test_compilation_during_startup_is_not_a_pause() -> None:
    story = server()
    story.paused(9500, 9900, "compile")
    assembler = Assembler()
    assembler.feed_events(story.in_order())
    pauses = [(ms(pause.started_at), pause.cause) for pause in assembler.pauses.drain_pauses()]
    assert [pause for pause in pauses if pause[1] in semconv.STARTUP_PAUSES] == [(9500, "compile")]
    assert {cause for _, cause in pauses} == {"gc", "compile"}


def test_compilation_in_a_working_worker_is_a_pause() -> None:
    """The first executed step shows that the worker is ready."""
    story = Starting(role="worker")
    story.imported(2000, "torch")
    story.paused(2100, 2900, "compile")
    story.add_event(PROCESS, 0, events.StepExecuted(ns(3100), ns(3000), "toy", 4242, 0, 1, 0))
    story.paused(3200, 3900, "compile")
    assembler = Assembler()
    assembler.feed_events(story.in_order())
    assert [ms(pause.started_at) for pause in assembler.pauses.drain_pauses()] == [3200]


def test_warmup_requests_do_not_end_the_startup() -> None:
    story = server()
    warm_up = story.arrives(7250, "warmup", http=False)
    story.step(7260, 8350, [warm_up])
    story.ends(8950, warm_up)
    assembler = Assembler()
    assembler.feed_events(story.in_order())
    assert not {"compile", "capture"} & {pause.cause for pause in assembler.pauses.drain_pauses()}


def test_only_the_first_request_links_to_the_start() -> None:
    story = server()
    warm_up, first, second = (
        story.arrives(7250, "warmup", http=False),
        story.arrives(9500, "first"),
        story.arrives(9600, "second"),
    )
    for at, member in ((8950, warm_up), (9550, first), (9650, second)):
        story.ends(at, member)
    assert [story.record(member).start_ids for member in (warm_up, first, second)] == [None, BEGUN, None]
    span = story.span("chat toy", first)
    assert [(link["trace_id"], link["span_id"]) for link in span["links"]] == [
        (BEGUN[0].hex(), BEGUN[1].hex())
    ]
    assert span["attributes"][semconv.FIRST_REQUEST] is True
    assert semconv.FIRST_REQUEST not in story.span("chat toy", second)["attributes"]


def test_child_start_is_part_of_server_start() -> None:
    story = Starting(role="engine", parent=b"a server")
    story.imported(2000, "torch")
    story.loaded(3500, 7000)
    story.add_event(PROCESS, 0, events.PhaseEnded(ns(8000), ns(7000), events.WARMUP, "vllm", "toy", ""))
    story.ready(9000, 9000, events.BY_ENGINE)
    story.died(20_000)
    root, *phases = story.start_spans()
    assert (root["name"], root["parent_span_id"]) == ("engine start", b"a server".hex())
    assert [phase["name"] for phase in phases] == ["imports", "weights", "warmup"]
    assert story.outcome() == ("engine", "", 9000)


def test_engine_start_without_a_parent_is_server_start() -> None:
    story = Starting(role="engine")
    story.ready(9000, 9000)
    (root, *_) = story.start_spans()
    assert (root["name"], root["parent_span_id"]) == ("server start", "")


# ── ready ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_first_request_marks_the_process_ready() -> None:
    story = Starting()
    story.loaded(100, 400)
    assert story.starts() == []
    story.arrives(900, http=False)
    assert story.outcome() == ("request", "", 900)


def test_engine_readiness_replaces_the_first_request() -> None:
    story = Starting()
    story.loaded(100, 400)
    story.ready(499, 500, events.BY_ENGINE)
    story.arrives(900, http=False)
    assert story.outcome() == ("engine", "", 500)


def test_engine_or_warmup_leaves_a_server_unready() -> None:
    story = Starting()
    story.imported(50, "uvicorn.config")
    story.ready(99, 100, events.BY_ENGINE)
    story.arrives(200, "warmup", http=False)
    assert story.starts() == []
    story.ready(300, 400)
    assert story.outcome() == ("lifespan", "", 400)


def test_without_lifespan_the_first_http_request_marks_ready() -> None:
    story = Starting()
    story.imported(50, "uvicorn.config")
    story.begins(100, events.READY)  # it raised, and the server continued
    story.arrives(200, "warmup", http=False)
    story.arrives(700)
    assert story.outcome() == ("request", "", 700)


def test_phases_after_the_start_are_excluded() -> None:
    story = server()
    story.loaded(9100, 9900)
    story.paused(8990, 9200, "compile")
    story.imported(9300, "torch._dynamo")
    story.ready(9400, 9500)
    assert [span["name"] for span in story.start_spans()] == [
        "server start", "imports", "weights", "ready", "compile", "capture",
    ]  # fmt: skip


def test_imports_during_another_phase_belong_to_it() -> None:
    story = Starting()
    story.imported(100, "transformers")
    story.loaded(300, 900)
    story.imported(500, "torch._dynamo")
    story.ready(950, 1000)
    assert "imports 0–100 · event infer.imported 100" in render_spans(story.start_spans())


def test_unseen_phase_is_absent() -> None:
    story = Starting()
    story.ready(10, 10)
    assert render_spans(story.start_spans()) == "server start 0–10"


def test_longest_phases_are_exported_and_others_counted() -> None:
    story = Starting()
    for number in range(100):
        story.paused(10 * number, 10 * number + 1 + number / 100, "compile")
    story.ready(2000, 2001)
    root, *phases = story.start_spans()
    assert len(phases) == 64 and root["attributes"][semconv.PHASES_DROPPED] == 37
    assert min(span["end"] - span["start"] for span in phases[:-1]) > 1_350_000


# ── failed ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_failed_lifespan_is_a_failed_start() -> None:
    story = Starting()
    story.ready(100, 300, error="OSError")
    assert render_spans(story.start_spans()) == text("""
        server start 0–300 · OSError, died in ready, ERROR
          ready 100–300 · OSError, ERROR
    """)


def test_death_while_loading_names_the_phase() -> None:
    story = Starting()
    story.imported(100, "torch")
    story.begins(200, events.WEIGHTS)
    story.died(900)
    assert render_spans(story.start_spans()) == text("""
        server start 0–900 · process_died, died in weights, ERROR
          imports 0–100 · event infer.imported 100
    """)


def test_failed_weights_fail_the_start_unless_retried() -> None:
    story = Starting()
    story.loaded(100, 200, "", "OSError")
    story.left(300)
    assert story.outcome() == ("", "OSError", 300)
    again = Starting()
    again.loaded(100, 200, "", "OSError")
    again.loaded(300, 400)
    again.ready(500, 600)
    assert again.outcome() == ("lifespan", "", 600)


def test_uncaught_exception_is_the_error_type() -> None:
    story = Starting()
    story.imported(100, "torch")
    story.left(200, "ModuleNotFoundError")
    assert story.outcome() == ("", "ModuleNotFoundError", 200)


@pytest.mark.parametrize("ends", [lambda s: s.left(500), lambda s: s.died(500)], ids=["left", "died"])
def test_process_that_only_imports_has_no_start(ends: Any) -> None:
    story = Starting()
    story.imported(100, "torch")
    ends(story)
    assert story.starts() == []


def test_script_that_loads_and_exits_has_no_start() -> None:
    story = Starting()
    story.loaded(100, 400)
    story.left(500)
    story.died(600)
    assert story.starts() == []


def test_death_after_serving_keeps_a_successful_start() -> None:
    story = server()
    story.died(60_000)
    assert story.outcome() == ("lifespan", "", 9000)


# ── once, and the same on replay ─────────────────────────────────────────────────────────────────────────────────


def test_start_waits_for_late_events() -> None:
    assembler = Assembler()
    assembler.feed_events(server().in_order())
    assert assembler.drain_starts(ns(9000) + GRACE_NS - 1) == []
    assert len(assembler.drain_starts(ns(9000) + GRACE_NS)) == 1
    assert assembler.drain_starts(AFTER_ALL_EVENTS) == []


def test_start_of_an_earlier_reader_is_only_linked() -> None:
    story = Starting(concluded_at=ns(9400))
    story.ready(7200, 9000)
    first = story.arrives(9500)
    story.ends(9900, first)
    assert story.starts() == []
    assert story.record(first).start_ids == BEGUN


def test_recording_replays_to_the_same_start(tmp_path: Path) -> None:
    story = server()
    story.died(20_000)
    writer = file.RecordingWriter(tmp_path / "tape")
    writer.write(story.in_order(), AFTER_ALL_EVENTS)
    writer.close()
    assembler = Assembler()
    for batch in file.read_batches(tmp_path / "tape"):
        assembler.feed_events(batch.recorded_events)
    assert assembler.drain_starts(AFTER_ALL_EVENTS) == story.starts()


def test_frequent_startup_events_fit_a_cell() -> None:
    frequent = (events.ModuleImported, events.PhaseBegan, events.PhaseEnded, events.ProcessLeft)
    assert all(events.LAYOUT_BY_EVENT[event].packed.size <= layout.BODY_BYTES for event in frequent)


# ── several processes ────────────────────────────────────────────────────────────────────────────────────────────

WORKER = PROCESS + 50


def forked() -> Starting:
    """A master that loads a model, and a worker that it forks."""
    story = Starting()
    story.loaded(100, 900)
    story.add_event(WORKER, 0, events.ProcessSeen(0, 78, "server", 0))
    story.add_event(WORKER, 0, events.ProcessStarted(ns(1000), 0, *BEGUN, bytes(8)))
    return story


def test_a_forked_worker_completes_the_start_of_its_master() -> None:
    story = forked()
    story.ends(2100, story.arrives(2000, http=False, process=WORKER))
    story.left(3000)
    assert story.outcome() == ("request", "", 2000)
    (record,) = story.starts()
    assert [phase.name for phase in record.phases] == ["weights"]


def test_a_forked_process_that_ends_leaves_the_start_open() -> None:
    story = forked()
    story.add_event(WORKER, 0, events.ProcessDied(ns(1500)))
    story.ready(2000, 3000)
    assert story.outcome() == ("lifespan", "", 3000)


def test_a_process_that_is_spawned_after_all_others_have_ended_is_no_second_start() -> None:
    story = Starting()
    story.ready(1000, 2000)
    story.died(3000)
    story.add_event(WORKER, 0, events.ProcessSeen(0, 78, "server", 0))
    story.add_event(WORKER, 0, events.ProcessStarted(ns(4000), 0, *BEGUN, bytes(8)))
    story.ends(5100, story.arrives(5000, http=False, process=WORKER))
    assert story.outcome() == ("lifespan", "", 2000)


def test_a_forked_process_killed_while_loading_is_a_failed_start() -> None:
    story = forked()
    story.add_event(WORKER, 0, events.PhaseBegan(ns(1200), events.WEIGHTS))
    story.add_event(WORKER, 0, events.ProcessDied(ns(1500)))
    assert story.outcome() == ("", "process_died", 1500)
    assert story.starts()[0].failed_phase == "weights"


def test_a_process_that_ends_between_phases_has_not_failed() -> None:
    """SIGTERM ends a process without a word, and it was not seen to do anything."""
    story = Starting()
    story.loaded(100, 900)
    story.died(5000)
    assert story.starts() == []


def test_a_failed_phase_is_named_by_its_own_error() -> None:
    story = Starting()
    story.loaded(100, 900, error="OSError")
    story.died(1000)
    assert story.outcome() == ("", "OSError", 1000)


def test_an_asgi_server_that_dies_before_it_is_ready_has_failed() -> None:
    story = Starting()
    story.imported(50, "uvicorn.config")
    story.loaded(100, 900)
    story.died(5000)
    assert story.outcome() == ("", "process_died", 5000)
