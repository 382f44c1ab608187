"""otel-infer demo: serves a tiny model, loads it and prints its traces."""
