"""Imported once by the forkserver, so that a trial starts with everything heavy in memory."""

import workbench.run  # noqa: F401  torch, Lightning and all of ours
