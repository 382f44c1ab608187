"""otel-infer doctor: checks what works in this environment."""
