"""How a run ended, in our words and in MLflow's."""

from dataclasses import dataclass

STATUS_OF = {
    "completed": "FINISHED",
    "crash": "FAILED",
    "config": "FAILED",
    "oom": "FAILED",
    "diverged": "FAILED",
    "interrupted": "KILLED",
    "cancelled": "KILLED",
    "lost": "KILLED",
}
"""MLflow's status for each outcome. FINISHED alone does not mean completed there, so a tag holds the outcome."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended."""

    name: str
    """A key of STATUS_OF."""
    reason: str = ""
    """One line for people."""
    traceback: str = ""
    step: int = 0
    validation_loss: float | None = None
    """The last val/loss of a completed run."""
    fit_seconds: float | None = None
    """Training and validation alone, without start-up and clean-up."""

    @property
    def status(self) -> str:
        """MLflow's word for it."""
        return STATUS_OF[self.name]


@dataclass(frozen=True)
class Status:
    """Where a running trial stands; kept in its status.json for the launcher's table."""

    step: int
    max_steps: int
    loss: float | None = None
    tokens_per_second: float | None = None
    validation_loss: float | None = None
