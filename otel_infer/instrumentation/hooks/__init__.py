"""Patches functions of other libraries: targets, patches, probes and instrumentors."""
