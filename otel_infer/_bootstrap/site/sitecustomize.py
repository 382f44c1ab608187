"""Instruments every Python process of `otel-infer run`, which puts this folder first on PYTHONPATH.

The `sitecustomize` that this file hides runs first. No error in here stops the interpreter from starting.
"""

import os
import sys


def _run_next_sitecustomize() -> None:
    """Runs the `sitecustomize` that this file hides, if there is one."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    here = os.path.dirname(os.path.abspath(__file__))
    rest = [entry for entry in sys.path if os.path.abspath(entry or ".") != here]
    spec = PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def _instrument_process() -> None:
    arguments = " ".join(getattr(sys, "orig_argv", ()))
    if "OTEL_INFER_SIDECAR" in os.environ or "multiprocessing.resource_tracker" in arguments:
        return
    try:
        import otel_infer
    except ImportError:
        print(
            f"otel_infer: not installed for {sys.executable}; install it there, or run `otel-infer` from that environment",
            file=sys.stderr,
        )
        return
    otel_infer.instrument()


try:
    _run_next_sitecustomize()
except Exception as reason:
    print(f"otel_infer: another sitecustomize failed: {type(reason).__name__}: {reason}", file=sys.stderr)
try:
    _instrument_process()
except Exception as reason:
    print(f"otel_infer: not instrumented: {type(reason).__name__}: {reason}", file=sys.stderr)
