"""Hooks for SGLang: its API server and its scheduler, which are two processes. The third, the detokenizer, has none.

    API server: _init_req_state ─▶ tokenize ─▶ _send_one_request ─▶ … first output ─▶ last output        `tokenizer_manager`
    scheduler:  Req.__init__ ─▶ waiting queue ─▶ (run_batch ─▶ process_batch_result)* ─▶ finished       `scheduler`, `scheduler_steps`

The request's ids travel in SGLang's own `time_stats`. Where it is idle, the scheduler turns in a busy loop, in which no hook is.
Read and run: 0.5.23.
"""

from __future__ import annotations

from otel_infer.instrumentation.sglang import scheduler, tokenizer_manager
from otel_infer.instrumentation.sglang._instrumentor import instrumentor

__all__ = ["instrumentor", "scheduler", "tokenizer_manager"]
