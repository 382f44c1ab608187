"""The shared memory between server and sidecar: its layout, its writers and its readers."""
