"""`python -m otel_infer` is `otel-infer`."""

import sys

from otel_infer.cli import main

if __name__ == "__main__":
    sys.exit(main())
