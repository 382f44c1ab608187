"""Where records go: OTLP spans, a provider's spans, metrics, the console."""
