"""otel-infer report: writes a recording as an HTML page."""
