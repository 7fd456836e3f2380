"""A sweep's progress on the terminal: a live table, or plain lines where the output is no terminal."""

import time
from collections import Counter
from datetime import timedelta
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from workbench.outcome import Outcome, Status
from workbench.plan import Plan, Trial

COLORS = {"done": "green", "completed": "green", "running": "cyan", "waiting": "dim"}


class SweepTable:
    """One row per trial: state, step, losses, tokens per second."""

    def __init__(self, plan: Plan, console: Console | None = None) -> None:
        """Args: the plan to show; where (standard error by default, since --json owns standard output)."""
        self.console = console or Console(stderr=True)
        self.trials = plan.trials
        self._states = {id(trial): "waiting" if trial.to_do else "done" for trial in plan.trials}
        self._status: dict[int, Status] = {}
        self._attempts: dict[int, int] = {}
        self._first: dict[int, tuple[float, int]] = {}
        """When which step was first seen in this attempt."""
        self._live = (
            Live(self._render(), console=self.console, refresh_per_second=4) if self.console.is_terminal else None
        )
        done = sum(not trial.to_do for trial in plan.trials)
        self.console.print(f"{len(plan.trials)} trials: {done} done, {len(plan.trials) - done} to run")

    def __enter__(self) -> "SweepTable":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live:
            self._live.update(self._render())
            self._live.stop()

    def running(self, trial: Trial, status: Status | None, *, attempts: int) -> None:
        """Shows where the running trial stands, in which attempt."""
        if self._live is None and self._states[id(trial)] != "running":
            again = f" (attempt {attempts})" if attempts > 1 else ""
            self.console.print(f"  running    {trial.cell.label}{again}", highlight=False)
        self._states[id(trial)], self._attempts[id(trial)] = "running", attempts
        if status is None:
            self._first.pop(id(trial), None)
        else:
            self._status[id(trial)] = status
            if status.step:
                self._first.setdefault(id(trial), (time.monotonic(), status.step))
        if self._live:
            self._live.update(self._render())

    def ended(self, trial: Trial, outcome: Outcome, *, again: bool) -> None:
        """Shows how a trial ended; a failure's reason stays above the table."""
        self._states[id(trial)] = outcome.name
        if outcome.name != "completed":
            then = ". Tries again." if again else ""
            line = f"[red]{outcome.name}[/red]  {escape(f'{trial.cell.label}: {outcome.reason}')}{then}"
            self.console.print(line, highlight=False)
        elif self._live is None:
            self.console.print(f"  completed  {trial.cell.label}", highlight=False)

    def _render(self) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0))
        for heading, side in (("trial", "left"), ("state", "left"), ("step", "right")):
            table.add_column(heading, justify=side, no_wrap=True)  # type: ignore[arg-type]
        for heading in ("train/loss", "val/loss", "tokens/s", "left"):
            table.add_column(heading, justify="right", no_wrap=True)
        with_attempts = any(count > 1 for count in self._attempts.values())
        if with_attempts:
            table.add_column("attempt", justify="right", no_wrap=True)
        for trial in self.trials:
            state, status = self._states[id(trial)], self._status.get(id(trial))
            table.add_row(
                trial.cell.label,
                f"[{COLORS.get(state, 'red')}]{state}",
                f"{status.step}/{status.max_steps}" if status and status.max_steps else "",
                _number(status.loss if status else None, "{:.3f}"),
                _number(status.validation_loss if status else None, "{:.3f}"),
                _number(status.tokens_per_second if status else None, "{:,.0f}"),
                self._time_left(trial) if state == "running" else "",
                *([str(self._attempts.get(id(trial), ""))] if with_attempts else []),
            )
        return table

    def _time_left(self, trial: Trial) -> str:
        """From the steps seen in this attempt: '3:05', or the empty string while there are too few."""
        status, (when, step) = self._status.get(id(trial)), self._first.get(id(trial), (0.0, 0))
        if status is None or status.step <= step:
            return ""
        seconds = (time.monotonic() - when) / (status.step - step) * (status.max_steps - status.step)
        return str(timedelta(seconds=round(seconds))).removeprefix("0:")


def print_plan(plan: Plan) -> None:
    """The dry run's table, on standard output."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    for heading in ("cell", "state"):
        table.add_column(heading, no_wrap=True, vertical="bottom")
    for heading in ("parameters", "tokens\nper step", "visible\npairs", "FLOPs"):
        table.add_column(heading, justify="right", no_wrap=True, vertical="bottom")
    for trial in plan.trials:
        size = trial.size
        table.add_row(
            trial.cell.label,
            trial.state,
            _short(size.parameter_count),
            f"{size.tokens_per_step:,}",
            _number(size.visible_pair_share, "{:.1%}"),
            _number(size.flops, "{:.2e}"),
        )
    for cell in plan.excluded:
        table.add_row(cell.label, "excluded", "", "", "", "")
    console = Console()
    console.print(table)
    reasons = Counter((trial.state, trial.why) for trial in plan.trials if trial.to_do and trial.why)
    reasons.update(("excluded", cell.excluded_why or "") for cell in plan.excluded)
    for (state, why), count in reasons.items():
        console.print(f"{state} ({count}): {why}", highlight=False)
    if any(trial.size.visible_pair_share is None for trial in plan.trials):
        console.print("The corpus is not tokenised yet, so visible pairs are unknown; `workbench prepare` does it.")
    to_do = sum(trial.to_do for trial in plan.trials)
    cells = "cell" if len(plan.trials) == 1 else "cells"
    console.print(f"{len(plan.trials)} {cells}, {to_do} to run. Nothing was written.")


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _short(count: float) -> str:
    """1017472 -> 1.02M"""
    power = min((len(str(int(count))) - 1) // 3, 4)
    return f"{count / 1000**power:.3g}{' KMBT'[power].strip()}"
