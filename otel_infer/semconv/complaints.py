"""Defines the symptoms that a diagnosis names, and the complaint of users for each."""

from __future__ import annotations

SYMPTOM_PRE_ENGINE = "pre_engine"
SYMPTOM_QUEUEING = "queueing"
SYMPTOM_PREFILL = "prefill"
SYMPTOM_STUTTER = "stutter"
SYMPTOM_PEAK = "peak"
SYMPTOM_HEAD_OF_LINE_BLOCKING = "head_of_line_blocking"
SYMPTOM_BATCHING = "batching"
SYMPTOM_LATE_END = "late_end"
SYMPTOM_SLOW_READER = "slow_reader"
SYMPTOM_NOT_ENOUGH_CPU = "not_enough_cpu"
SYMPTOM_TOO_MANY_AT_ONCE = "too_many_at_once"
SYMPTOM_ABANDONED_WORK = "abandoned_work"
SYMPTOM_SLOW_MODEL = "slow_model"

COMPLAINTS = {
    SYMPTOM_PRE_ENGINE: "slow even for tiny prompts",
    SYMPTOM_QUEUEING: "fine locally, bad in production",
    SYMPTOM_PREFILL: "nothing for a while, then fast",
    SYMPTOM_STUTTER: "starts, then freezes or stutters",
    SYMPTOM_PEAK: "explodes at peak hours",
    SYMPTOM_HEAD_OF_LINE_BLOCKING: "big customers slow down small ones",
    SYMPTOM_BATCHING: "cheap batch mode is fine, live is slow",
    SYMPTOM_LATE_END: "the answer is there, but the request does not end",
    SYMPTOM_SLOW_READER: "some clients receive slowly",
    SYMPTOM_NOT_ENOUGH_CPU: "everything is slow at times",
    SYMPTOM_ABANDONED_WORK: "time-outs and retries make it worse",
    SYMPTOM_TOO_MANY_AT_ONCE: "one user is fast, many are slow",
    SYMPTOM_SLOW_MODEL: "slow for everyone, all the time",
}
"""What users report, by symptom. Diagnosis and alerts quote it."""
