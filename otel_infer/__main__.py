"""Runs the `otel-infer` command as `python -m otel_infer`."""

import sys

from otel_infer.cli import main

if __name__ == "__main__":
    sys.exit(main())
