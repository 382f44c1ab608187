"""BentoML, with batches of its dispatcher. It reads annotations at run time, so they must not be strings."""

import bentoml
import torch

from benchmarks.server_truth.programs import work


@bentoml.service(workers=1, threads=4, traffic={"timeout": 30})
class Classes:
    @bentoml.api(batchable=True, max_batch_size=work.MAX_BATCH, max_latency_ms=5000)
    def classify(self, texts: list[str]) -> list[int]:
        classes = work.classify_batch([torch.ones(work.WIDTH) for _ in texts])
        return work.finish(classes)["classes"]
