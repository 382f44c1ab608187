"""Follows requests into other processes: jobs of process pools, and items of multiprocessing's queues."""

from __future__ import annotations

from otel_infer.instrumentation.multiprocessing import managers, pools, process, queues
from otel_infer.instrumentation.multiprocessing._instrumentor import instrumentor

__all__ = ["instrumentor", "managers", "pools", "process", "queues"]
