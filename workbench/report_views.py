"""A sweep's report for people: terminal, Markdown, CSV, a figure, and all of them on the parent run."""

import csv
import io
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from workbench.report import LENGTH, LOSS, MEMORY, SHARE, SPEED, Report, Row
from workbench.tracking import Tracker

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SPEED_UP = "speed-up"

COLUMNS: dict[str, Callable[[Row], str]] = {
    "val/loss": lambda row: _metric(row, LOSS, "{:.4f}"),
    "tokens/s": lambda row: _metric(row, SPEED, "{:,.0f}"),
    SPEED_UP: lambda row: f"{row.speed_up:.2f}x" if row.speed_up is not None else "-",
    "visible pairs": lambda row: _metric(row, SHARE, "{:.1%}"),
    "peak GB": lambda row: _metric(row, MEMORY, "{:.2f}"),
    "kernel": lambda row: row.kernel,
    "device": lambda row: row.device,
    "seeds": lambda row: str(len(row.seeds)),
    "outcome": lambda row: row.outcome,
}
SAID_ONCE = (SPEED_UP, "kernel", "device", "seeds", "outcome")
"""Columns that the terminal shows as one line below the table where all cells agree."""


def _metric(row: Row, name: str, form: str) -> str:
    return row.metrics[name].text(form) if name in row.metrics else ""


def as_table(report: Report) -> tuple[list[str], list[list[str]], dict[str, str]]:
    """Headings, cells as text, and what all cells agree in (left out of the table)."""
    headings = [key.rpartition(".")[2] for key in report.axis_keys] + list(COLUMNS)
    rows = [
        [str(row.axes.get(key, "")) for key in report.axis_keys] + [column(row) for column in COLUMNS.values()]
        for row in report.rows
    ]
    common = {
        heading: rows[0][index]
        for index, heading in enumerate(headings)
        if rows and heading in SAID_ONCE and len({row[index] for row in rows}) == 1
    }
    kept = [index for index, heading in enumerate(headings) if heading not in common]
    return [headings[index] for index in kept], [[row[index] for index in kept] for row in rows], common


def footnotes(report: Report, common: dict[str, str]) -> list[str]:
    """What all cells agree in, and why a speed-up is blank."""
    agreed = ", ".join(f"{heading} {value}" for heading, value in common.items() if value.strip("-"))
    reasons = Counter(row.speed_up_blank for row in report.rows if row.speed_up is None)
    return [f"All cells: {agreed}."] * bool(agreed) + [
        f"No speed-up ({count} {'cell' if count == 1 else 'cells'}): {reason}." for reason, count in reasons.items()
    ]


def as_markdown(report: Report) -> str:
    """The table for a page."""
    headings, rows, common = as_table(report)
    lines = ["| " + " | ".join(cells) + " |" for cells in [headings, ["---"] * len(headings), *_escaped(rows)]]
    return f"# {report.sweep}\n\n" + "\n\n".join(["\n".join(lines), *footnotes(report, common), EXPLANATION]) + "\n"


EXPLANATION = (
    "`val/loss`: nats per token over each validation document's second and later tokens, the same tokens for every "
    "strategy. `tokens/s`: median over the logged steps without the first; anchors and padding count. `speed-up`: over "
    "full attention in the same kernel on the same device. `visible pairs`: of full causal attention on the same rows. "
    "± is the sample standard deviation over seeds."
)


def _escaped(rows: list[list[str]]) -> list[list[str]]:
    return [[cell.replace("|", "\\|") for cell in row] for row in rows]


def as_csv(report: Report) -> str:
    """Full precision, one column per number."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    names = sorted({name for row in report.rows for name in row.metrics})
    spreads = [f"{name} {part}" for name in names for part in ("mean", "std")]
    writer.writerow([*report.axis_keys, *spreads, "speed_up", "speed_up_blank", "kernel", "device", "seeds", "outcome"])
    for row in report.rows:
        numbers: list[Any] = []
        for name in names:
            spread = row.metrics.get(name)
            numbers += [spread.mean, spread.std] if spread else [None, None]
        axes = [row.axes.get(key, "") for key in report.axis_keys]
        seeds = " ".join(map(str, row.seeds))
        writer.writerow([*axes, *numbers, row.speed_up, row.speed_up_blank, row.kernel, row.device, seeds, row.outcome])
    return out.getvalue()


def as_figure(report: Report) -> "Figure":
    """Loss and speed over context length (or the first axis), one line per combination of the others."""
    from matplotlib.figure import Figure

    across = LENGTH if LENGTH in report.axis_keys else (report.axis_keys or [""])[0]
    lines: dict[str, list[Row]] = {}
    for row in report.rows:
        others = {key: value for key, value in row.axes.items() if key != across}
        lines.setdefault(", ".join(map(str, others.values())) or report.sweep, []).append(row)
    ticks = list(dict.fromkeys(str(row.axes.get(across, "")) for row in report.rows))
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    panels = figure.subplots(1, 2)
    for panel, (metric, title) in zip(
        panels, ((LOSS, "val/loss (nats per token)"), (SPEED, "tokens per second")), strict=True
    ):
        for name, rows in lines.items():
            known = [row for row in rows if metric in row.metrics]
            panel.errorbar(
                [ticks.index(str(row.axes.get(across, ""))) for row in known],
                [row.metrics[metric].mean for row in known],
                yerr=[row.metrics[metric].std or 0.0 for row in known],
                marker="o",
                capsize=3,
                label=name,
            )
        panel.set_title(title)
        panel.set_xticks(range(len(ticks)), ticks)
        panel.set_xlabel(across)
        panel.grid(alpha=0.3)
    panels[1].set_ylim(bottom=0)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    figure.suptitle(report.sweep)
    return figure


def log_report(tracker: Tracker, report: Report) -> None:
    """Writes the report on the sweep's parent run."""
    tracker.client.log_text(report.parent, as_markdown(report), "report.md")
    tracker.client.log_text(report.parent, as_csv(report), "report.csv")
    tracker.client.log_dict(report.parent, report.to_json(), "report.json")
    tracker.client.log_figure(report.parent, as_figure(report), "report.png")
    tracker.client.set_tag(report.parent, "mlflow.note.content", as_markdown(report)[:8000])


def print_report(report: Report) -> None:
    """The table on the terminal."""
    from rich.console import Console, JustifyMethod
    from rich.table import Table

    headings, rows, common = as_table(report)
    table = Table(box=None, padding=(0, 1, 0, 0), title=report.sweep, title_justify="left")
    for heading in headings:
        side: JustifyMethod = "right" if heading in COLUMNS else "left"
        narrow = heading.replace("_", "\n").replace(" ", "\n")  # so that the table fits 80 columns
        table.add_column(narrow, justify=side, vertical="bottom")
    for row in rows:
        table.add_row(*row)
    console = Console()
    console.print(table, highlight=False)
    for line in footnotes(report, common):
        console.print(line, highlight=False)
