"""The attention settings: what is computed, and by what. Imports without torch."""

from dataclasses import dataclass, replace

from modules.attention.capabilities import check_kernel_name, check_name
from modules.attention.strategies import STRATEGIES, Strategy


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Strategy, window and sink decide the result; kernel decides speed and memory.

    Raises:
        ValueError: there is no strategy or kernel of that name, or the strategy has no such window or sink.
    """

    strategy: str = "full"
    """Which keys a query may see: a name in `STRATEGIES`."""
    window: int | None = None
    """The latest tokens of its document that a query sees, itself included. Null = the strategy's own."""
    sink: int | None = None
    """The first tokens of its document that a query sees beside the window. Null = the strategy's own."""
    kernel: str = "auto"
    """What computes it: a name in `KERNELS`, or `auto` for the fastest that can serve."""

    def __post_init__(self) -> None:
        check_name("attention.strategy", self.strategy, tuple(STRATEGIES))
        check_kernel_name(self.kernel)
        strategy = STRATEGIES[self.strategy]
        broken = [
            f"{key}={value} means nothing to attention.strategy={self.strategy!r}. "
            f"Leave it null, or set attention.strategy to {' or '.join(repr(s.name) for s in able)}."
            for key, value, able in (
                ("attention.window", self.window, [s for s in STRATEGIES.values() if s.window is not None]),
                ("attention.sink", self.sink, [s for s in STRATEGIES.values() if s.sink]),
            )
            if value is not None and strategy not in able
        ]
        if self.window is not None and self.window < 1:
            broken.append(f"attention.window={self.window} must be at least 1, the query itself.")
        if self.sink is not None and self.sink < 0:
            broken.append(f"attention.sink={self.sink} must be at least 0.")
        if broken:
            raise ValueError("\n".join(broken))

    def resolve(self) -> Strategy:
        """The registered strategy, with this window and sink where they are set."""
        strategy = STRATEGIES[self.strategy]
        window = strategy.window if self.window is None else self.window
        return replace(strategy, window=window, sink=strategy.sink if self.sink is None else self.sink)
