"""Probes of kernel counters about the threads and control groups of a server."""
