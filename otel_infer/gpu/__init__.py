"""Measures device time and memory without synchronising, and reads NVML for the sidecar."""
