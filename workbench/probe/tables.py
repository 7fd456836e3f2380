"""A probe's numbers as rows: for JSON, CSV files and the terminal."""

import csv
import io
from collections.abc import Iterable, Mapping
from typing import Any

from workbench.probe.measure import ConditionResult
from workbench.probe.settings import Condition, ProbeSettings


def deviation_rows(settings: ProbeSettings, results: Iterable[ConditionResult]) -> list[dict[str, Any]]:
    """One row for each condition, length and shift; means over sequences."""
    rows = []
    for result in results:
        mean = result.mean
        each_SN = [one.deviation_SN for one in result.deviations]
        for n, tokens in enumerate(mean.lengths):
            for s, shift in enumerate(settings.shifts):
                values = [float(one[s, n]) for one in each_SN]
                rows.append(
                    {
                        "tokens": tokens,
                        **_names(result.condition),
                        "reference_shift": settings.reference_shift,
                        "shift": shift,
                        "deviation": float(mean.deviation_SN[s, n]),
                        "deviation_std": _spread(values),
                        "row_deviation": float(mean.row_deviation_SN[s, n]),
                        "first_token_share": float(mean.first_token_share_SN[s, n]),
                        "logit_deviation": float(mean.logit_deviation_SN[s, n]),
                    }
                )
    return rows


def consistency_rows(settings: ProbeSettings, results: Iterable[ConditionResult]) -> list[dict[str, Any]]:
    """One row for each condition and offset; mean over rows of text, largest over all."""
    rows = []
    for result in results:
        for index, offset in enumerate(settings.offsets if result.consistency else ()):
            each = [row[index] for row in result.consistency]
            rows.append(
                {
                    "tokens": settings.tokens,
                    **_names(result.condition),
                    "offset": offset,
                    "mean_kl": sum(one.mean_kl for one in each) / len(each),
                    "max_logit_difference": max(one.max_logit_difference for one in each),
                }
            )
    return rows


def head_rows(settings: ProbeSettings, results: Iterable[ConditionResult]) -> list[dict[str, Any]]:
    """One row for each condition, shift, layer and head, of whole sequences."""
    rows = []
    for result in results:
        mean = result.mean
        _, _, layers, heads = mean.head_SNLH.shape
        for s, shift in enumerate(settings.shifts):
            for layer in range(layers):
                for head in range(heads):
                    at = (s, -1, layer, head)
                    rows.append(
                        {
                            **_names(result.condition),
                            "shift": shift,
                            "layer": layer,
                            "head": head,
                            "deviation": float(mean.head_SNLH[at]),
                            "row_deviation": float(mean.row_SNLH[at]),
                            "first_token_share": float(mean.first_SNLH[at] / mean.row_SNLH[at].clamp(min=1e-300)),
                            "logit_deviation": float(mean.logit_SNLH[at]),
                        }
                    )
    return rows


def token_rows(settings: ProbeSettings, results: Iterable[ConditionResult]) -> list[dict[str, Any]]:
    """One row for each condition and token: what its column adds to D, mean over shifts."""
    return [
        {**_names(result.condition), "token": token, "deviation": value}
        for result in results
        for token, value in enumerate(result.mean.token_ST.mean(0).tolist())
    ]


def as_csv(rows: list[dict[str, Any]]) -> str:
    """With a header line, numbers in full precision."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def print_probe(settings: ProbeSettings, rows: list[dict[str, Any]], consistency: list[dict[str, Any]]) -> None:
    """The terminal's tables: deviations of whole sequences over shifts, and of logits over offsets."""
    _print_table(
        f"{settings.sequences} sequence{'s' * (settings.sequences > 1)} of {settings.tokens} tokens, {settings.mode}, "
        f"against shift {settings.reference_shift}",
        ("shift", "D", "row dev.", "1st token", "D_logit"),
        [
            (
                row,
                f"{row['shift']:,}",
                _number(row["deviation"]),
                _number(row["row_deviation"]),
                f"{row['first_token_share']:.1%}" if row["row_deviation"] else "-",
                _number(row["logit_deviation"]),
            )
            for row in rows
            if row["tokens"] == settings.tokens
        ],
    )
    if consistency:
        print()
        _print_table(
            "Logits of packed documents, continuous positions against restarting ones",
            ("row begins at", "mean KL", "largest difference"),
            [
                (row, f"{row['offset']:,}", _number(row["mean_kl"]), _number(row["max_logit_difference"]))
                for row in consistency
            ],
        )


def _print_table(title: str, columns: tuple[str, ...], lines: list[tuple[Any, ...]]) -> None:
    """Each line a row, of whose condition the label is shown where it changes, and texts."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", header_style="bold", box=None, pad_edge=False)
    table.add_column("condition", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    last = ""
    for row, *texts in lines:
        label = condition_of(row).label
        table.add_row("" if label == last else label, *texts)
        last = label
    Console().print(table)


def condition_of(row: Mapping[str, Any]) -> Condition:
    """The condition that a row is of."""
    return Condition(**{key: row[key] for key in ("dtype", "rotary_dtype", "rotary_precision", "weights")})


def _names(condition: Condition) -> Mapping[str, str]:
    return {
        "rotary_precision": condition.rotary_precision,
        "rotary_dtype": condition.rotary_dtype,
        "dtype": condition.dtype,
        "weights": condition.weights,
    }


def _spread(values: list[float]) -> float | None:
    import statistics

    return statistics.stdev(values) if len(values) > 1 else None


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.2e}" if value < 0.01 else f"{value:.4f}" if value < 1 else f"{value:.3f}"
