"""Returns the attributes that every metric of a request has: operation, provider and served model."""

from __future__ import annotations

from otel_infer import semconv
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.export.metrics.counters import CardinalityLimit
from otel_infer.export.metrics.histograms import Key

MAX_MODELS = 50
MAX_CACHED_KEYS = 256
"""Combinations of names whose keys are stored, because nearly all requests have the same few."""


class RequestKeys:
    """The admitted names. Any further name becomes `_OTHER`."""

    def __init__(self) -> None:
        self.version = 0
        """Changes when a request may get another key than before."""
        self._served_models: set[str] = set()
        self._operations, self._providers = CardinalityLimit(MAX_MODELS), CardinalityLimit(MAX_MODELS)
        self._keys: dict[tuple[str, str, str], Key] = {}

    def allow_model(self, model: str) -> None:
        """Allows metrics to name this served model; the first 50 are allowed."""
        if model and model not in self._served_models and len(self._served_models) < MAX_MODELS:
            self._served_models.add(model)
            self._keys.clear()
            self.version += 1

    def make_key(self, record: RequestRecord) -> Key:
        """Returns operation, provider and model; a model that is not allowed is `_OTHER`."""
        names = operation, provider, model = record.operation, record.provider, record.model
        key = self._keys.get(names)
        if key is None:
            served = model if model in self._served_models else semconv.OTHER
            key = (
                self._operations.admit_label(operation),
                self._providers.admit_label(provider),
                served if model else None,
            )
            if len(self._keys) < MAX_CACHED_KEYS:
                self._keys[names] = key
        return key
