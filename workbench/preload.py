"""Imported once by the forkserver, so that a trial starts with everything heavy in memory."""

import mlflow.entities
import mlflow.store.tracking.sqlalchemy_store
import mlflow.tracking

import workbench.run  # noqa: F401  torch, Lightning and all of ours
