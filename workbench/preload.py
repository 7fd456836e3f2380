"""Imported once by the forkserver, so that a trial starts with everything heavy in memory."""

import mlflow.entities
import mlflow.store.tracking.sqlalchemy_store
import mlflow.tracking  # noqa: F401
from sqlalchemy.orm import configure_mappers

import modules.precision_plugins  # noqa: F401
import workbench.run
import workbench.trial  # noqa: F401
from modules.attention.capabilities import KERNELS, load_kernel
from workbench.environment import code_version, packages

configure_mappers()  # MLflow's tables: otherwise each trial's first query does it
packages()
code_version()  # of the code that is now in memory: a trial refuses to run if the launcher's differs
for kernel in KERNELS:
    load_kernel(kernel)
