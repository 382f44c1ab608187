"""The flight recorder: the sidecar's last two minutes of events, written as a tape on request."""
