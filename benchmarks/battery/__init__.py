"""Faults on servers whose engines compute, and whether `otel-infer explain` names them from the tape alone."""
