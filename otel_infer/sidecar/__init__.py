"""The process that reads the rings of a server and exports its telemetry."""
