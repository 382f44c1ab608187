"""The shared memory between server and sidecar: layout, the writing side (server) and the reading side (sidecar)."""
