"""The live request span in the server, its ids and its propagation."""

from otel_infer.config.propagators import load_api

load_api()
