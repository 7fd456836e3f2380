"""What a sweep asks of whatever runs its trials: this machine, or a cluster.

    launcher.slots(need) -> how many trials may run at once
    launcher.start(spec) -> RunningTrial; its poll() says how it ended, stop() ends it
    launcher.close()

Every launcher runs the same trial (`workbench.trial`) in a process group of its own, which leaves its outcome in its
folder; what a launcher adds is evidence that a dead process cannot leave.
"""

from dataclasses import dataclass
from typing import Protocol

from workbench.trial import TrialSpec


@dataclass(frozen=True, kw_only=True)
class Need:
    """What one trial takes."""

    cpus: int | None
    """Cores, which are its threads. None: an equal share of the machine."""
    gpus: int


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a trial's process ended."""

    exit_code: int | None
    """Negative: the signal that ended it. None: nobody knows."""
    out_of_host_memory: bool = False
    """Whether the kernel killed a process for memory meanwhile."""
    lost_why: str = ""
    """Why it is gone without a word: its worker or machine died."""


class RunningTrial(Protocol):
    """A trial that was started."""

    def poll(self) -> Ended | None:
        """How it ended, or None while it runs."""

    def ask_to_end(self) -> None:
        """SIGTERM to its process group; returns at once."""

    def stop(self) -> None:
        """SIGTERM, grace, SIGKILL; returns when its processes are gone."""


class Launcher(Protocol):
    """Starts trials."""

    name: str
    """As in --launcher."""
    needs_server: bool
    """Whether trials may run on other machines, which a sqlite file does not survive."""

    def slots(self, need: Need) -> int:
        """How many trials of that size run at once.

        Raises:
            UserError: not even one ever could.
        """

    def start(self, spec: TrialSpec, need: Need) -> RunningTrial:
        """Starts a trial in its folder. Only ever called with a free slot."""

    def close(self) -> None:
        """Lets go of whatever the launcher holds; no trial runs any more."""
