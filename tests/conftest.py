"""Set before torch loads: waiting threads spin only shortly, so that tests in parallel do not slow one another."""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "2000")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
