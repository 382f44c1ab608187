"""otel-infer explain: names the symptom of slow requests."""
