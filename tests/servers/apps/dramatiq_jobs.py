"""Dramatiq's actor. `python -m dramatiq tests.servers.apps.dramatiq_jobs`."""

from tests.servers.apps.jobs import make_dramatiq

actor = make_dramatiq()
