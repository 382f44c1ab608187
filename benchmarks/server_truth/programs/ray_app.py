"""Ray Serve, with the model in a thread of its replica."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

import ray
from ray import serve
from starlette.requests import Request

from benchmarks.server_truth.programs.work import classify, finish


@serve.deployment(max_ongoing_requests=16, ray_actor_options={"num_cpus": 0.1})
class Classes:
    async def __call__(self, request: Request) -> Any:
        await request.json()
        classes = await asyncio.to_thread(classify)
        return await asyncio.to_thread(finish, classes)


if __name__ == "__main__":
    ray.init(
        address="local", num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1",
        object_store_memory=100 << 20, log_to_driver=False,
    )  # fmt: skip
    serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
    serve.run(Classes.bind(), route_prefix="/classify")  # type: ignore[attr-defined]
    while True:
        time.sleep(60)
