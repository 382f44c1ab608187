"""Celery's application. `python -m celery -A tests.servers.apps.celery_jobs worker`."""

from tests.servers.apps.jobs import make_celery

app = make_celery()
