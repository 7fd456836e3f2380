"""The two attention settings: what is computed, and by what. Imports without torch."""

from dataclasses import dataclass

from modules.attention.capabilities import check_kernel_name, check_name
from modules.attention.strategies import STRATEGIES


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Strategy decides the result; kernel decides speed and memory.

    Raises:
        ValueError: there is no strategy or kernel of that name.
    """

    strategy: str = "full"
    """Which keys a query may see: a name in `STRATEGIES`."""
    kernel: str = "auto"
    """What computes it: a name in `KERNELS`, or `auto` for the fastest that can serve."""

    def __post_init__(self) -> None:
        check_name("attention.strategy", self.strategy, tuple(STRATEGIES))
        check_kernel_name(self.kernel)
