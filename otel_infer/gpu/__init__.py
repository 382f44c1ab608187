"""Device time beside host time, without a synchronisation: marks on the device's streams, and memory. And NVML, for the sidecar."""
