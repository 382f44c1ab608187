"""Reads what the kernel counts about the threads and control group of a server."""
