"""Defines the symptoms that a diagnosis names, and the complaint of users for each."""

from __future__ import annotations

SYMPTOM_PRE_ENGINE = "pre_engine"
SYMPTOM_QUEUEING = "queueing"
SYMPTOM_PREFILL = "prefill"
SYMPTOM_STUTTER = "stutter"
SYMPTOM_PEAK = "peak"
SYMPTOM_HEAD_OF_LINE_BLOCKING = "head_of_line_blocking"
SYMPTOM_BATCHING = "batching"

COMPLAINTS = {
    SYMPTOM_PRE_ENGINE: "slow even for tiny prompts",
    SYMPTOM_QUEUEING: "fine locally, bad in production",
    SYMPTOM_PREFILL: "nothing for a while, then fast",
    SYMPTOM_STUTTER: "starts, then freezes or stutters",
    SYMPTOM_PEAK: "explodes at peak hours",
    SYMPTOM_HEAD_OF_LINE_BLOCKING: "big customers slow down small ones",
    SYMPTOM_BATCHING: "cheap batch mode is fine, live is slow",
}
"""What users report, by symptom. Diagnosis and alerts quote it."""
