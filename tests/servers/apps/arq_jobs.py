"""arq's worker. `python -m arq tests.servers.apps.arq_jobs.WorkerSettings`."""

from typing import Any, ClassVar

from arq.connections import RedisSettings

from tests.servers.apps.jobs import REDIS, classify_later


class WorkerSettings:
    functions: ClassVar[list[Any]] = [classify_later]
    redis_settings = RedisSettings.from_dsn(REDIS)
    poll_delay = 0.05
