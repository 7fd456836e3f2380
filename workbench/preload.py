"""Imported once by the forkserver, so that a trial starts with everything heavy in memory."""

import mlflow.entities
import mlflow.store.tracking.sqlalchemy_store
import mlflow.tracking  # noqa: F401
from sqlalchemy.orm import configure_mappers

import workbench.run  # noqa: F401  torch, Lightning and all of ours
from workbench.environment import packages

configure_mappers()  # MLflow's tables: otherwise each trial's first query does it
packages()
