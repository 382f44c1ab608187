"""A sidecar that was killed is restarted at once; one that crashes again and again, later and later."""

from __future__ import annotations

from otel_infer.sidecar.launcher import RestartBackoff

S = 1_000_000_000
KILLED, ENDED, CRASHED = -9, 0, 1


def start_soon_and_often(backoff: RestartBackoff, starts: int) -> int:
    """Starts a sidecar each second; returns the instant of the last start."""
    for second in range(starts):
        backoff.record_start(100 * S + second * S)
    return 100 * S + (starts - 1) * S


def test_a_killed_sidecar_is_due_within_a_second_however_often() -> None:
    backoff = RestartBackoff()
    at = start_soon_and_often(backoff, 20)
    for status in (KILLED, ENDED, None):
        assert not backoff.is_due(at + S // 2, status)
        assert backoff.is_due(at + S, status)


def test_a_crashing_sidecar_is_due_later_and_later() -> None:
    backoff = RestartBackoff()
    at = start_soon_and_often(backoff, 4)
    assert not backoff.is_due(at + 7 * S, CRASHED)
    assert backoff.is_due(at + 8 * S, CRASHED)


def test_the_first_start_is_due_at_once() -> None:
    assert RestartBackoff().is_due(0, None)
