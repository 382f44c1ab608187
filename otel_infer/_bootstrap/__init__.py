"""Installs instrumentation in a process: the composition root and the entry points."""
