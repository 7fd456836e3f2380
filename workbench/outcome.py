"""How a run ended, in our words and in MLflow's."""

from dataclasses import dataclass

STATUS_OF = {
    "completed": "FINISHED",
    "crash": "FAILED",
    "config": "FAILED",
    "oom": "FAILED",
    "host_oom": "FAILED",
    "hardware": "FAILED",
    "diverged": "FAILED",
    "timeout": "KILLED",
    "interrupted": "KILLED",
    "cancelled": "KILLED",
    "lost": "KILLED",
}
"""MLflow's status for each outcome. FINISHED alone does not mean completed there, so a tag holds the outcome.

    crash        an exception of the training
    config       an exception before the first step: settings, data, imports
    oom          the device had too little memory
    host_oom     the machine had, and the kernel killed the process
    hardware     CUDA or NCCL reported a fault
    diverged     the loss was not finite
    timeout      limits.timeout passed
    interrupted  SIGTERM from outside
    cancelled    Ctrl-C, or SIGTERM to the sweep
    lost         killed from outside, or gone with its machine
"""

GOES_ON = ("interrupted", "cancelled", "lost", "host_oom", "timeout")
"""Outcomes after which the same run goes on: what it had done still holds."""


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
