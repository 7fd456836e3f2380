"""A probe's figures: the paper's three panels, where in the model it breaks, and how much the first token holds."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from workbench.probe.measure import ConditionResult
from workbench.probe.settings import ProbeSettings

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FLOOR = 1e-12
"""Where a deviation of exactly 0 is drawn on a logarithmic axis."""


def draw(name: str, settings: ProbeSettings, results: Sequence[ConditionResult]) -> dict[str, "Figure"]:
    """File name -> figure."""
    figures = {
        "shifts_tokens_lengths.png": _three_panels(name, settings, results),
        "layers_and_heads.png": _heatmap(name, settings, results),
        "first_token_share.png": _first_token(name, settings, results),
    }
    if len({result.condition.rotary_dtype for result in results if result.condition.emulated}) > 1:
        figures["mantissa_bits.png"] = _bits(name, settings, results)
    return figures


def _three_panels(name: str, settings: ProbeSettings, results: Iterable[ConditionResult]) -> "Figure":
    figure, (by_shift, by_token, by_length) = _subplots(3)
    for result in results:
        mean, label, style = result.mean, result.condition.label, _style(result)
        order = sorted(range(len(settings.shifts)), key=settings.shifts.__getitem__)
        shifts = [settings.shifts[i] for i in order]
        by_shift.plot(shifts, [_drawn(mean.deviation_SN[i, -1]) for i in order], marker="o", markersize=3,
                      label=label, **style)  # fmt: skip
        by_token.plot(range(1, settings.tokens + 1), [_drawn(x) for x in mean.token_ST.mean(0)], linewidth=0.8, **style)
        furthest = max(range(len(shifts)), key=lambda i: abs(settings.shifts[i] - settings.reference_shift))
        by_length.plot(mean.lengths, [_drawn(x) for x in mean.logit_deviation_SN[furthest]], marker="o", markersize=3,
                       **style)  # fmt: skip
    _shift_axis(by_shift, settings)
    by_shift.set(yscale="log", ylabel="D", title=f"Attention against shift {settings.reference_shift}")
    by_token.set(xscale="log", yscale="log", xlabel="token, counted from 1", ylabel="its part of D",
                 title="Which token")  # fmt: skip
    by_length.set(xscale="log", yscale="log", xlabel="length T in tokens", ylabel="$D_{logit}$",
                  title="The first token's scores")  # fmt: skip
    by_length.set_xticks(settings.all_lengths(), [str(length) for length in settings.all_lengths()])
    by_length.set_xticks([], minor=True)
    figure.legend(loc="outside lower center", ncols=3, fontsize="small")
    figure.suptitle(f"{name}: how far RoPE is from relative", fontsize="medium")
    return figure


def _heatmap(name: str, settings: ProbeSettings, results: Sequence[ConditionResult]) -> "Figure":
    """Row deviation of every head, of the condition that breaks most, the negative control aside: where to look."""
    usual = [result for result in results if result.condition.rotary_precision != "low_positions"] or results
    worst = max(usual, key=lambda result: float(result.mean.row_deviation_SN[:, -1].mean()))
    figure, (axes,) = _subplots(1, width=6.5)
    image = axes.imshow(worst.mean.row_SNLH[:, -1].mean(0).numpy(), aspect="auto", cmap="viridis", origin="lower")
    axes.set(xlabel="head", ylabel="layer", title=f"{name}, {worst.condition.label}")
    figure.colorbar(image, label="row deviation, mean over shifts")
    return figure


def _first_token(name: str, settings: ProbeSettings, results: Iterable[ConditionResult]) -> "Figure":
    figure, (axes,) = _subplots(1, width=6.5)
    for result in results:
        order = sorted(range(len(settings.shifts)), key=settings.shifts.__getitem__)
        share_S = result.mean.first_token_share_SN[:, -1]
        axes.plot([settings.shifts[i] for i in order], [100 * float(share_S[i]) for i in order], marker="o",
                  markersize=3, label=result.condition.label, **_style(result))  # fmt: skip
    axes.axhline(100 / settings.tokens, color="grey", linewidth=0.8, linestyle=":", label="an equal share")
    _shift_axis(axes, settings)
    axes.set(ylabel="% of the row deviation", ylim=(0, None),
             title=f"{name}: what the first of {settings.tokens} tokens holds")  # fmt: skip
    figure.legend(loc="outside lower center", ncols=2, fontsize="small")
    return figure


def _bits(name: str, settings: ProbeSettings, results: Iterable[ConditionResult]) -> "Figure":
    """Row deviation over mantissa bits, one curve for each shift and place of the rounding."""
    from modules.number_formats import NumberFormat

    figure, (axes,) = _subplots(1, width=6.5)
    emulated = [result for result in results if result.condition.emulated]
    for rounded in dict.fromkeys(result.condition.rotary_precision for result in emulated):
        chosen = [result for result in emulated if result.condition.rotary_precision == rounded]
        chosen.sort(key=lambda result: NumberFormat.of(result.condition.rotary_dtype).mantissa_bits)
        bits = [NumberFormat.of(result.condition.rotary_dtype).mantissa_bits for result in chosen]
        for s, shift in enumerate(settings.shifts):
            values = [_drawn(result.mean.row_deviation_SN[s, -1]) for result in chosen]
            axes.plot(bits, values, marker="o", markersize=3, label=f"{rounded.removeprefix('emulated_')}, {shift:,}")
    axes.set(yscale="log", xlabel="mantissa bits", ylabel="row deviation",
             title=f"{name}: how many bits RoPE needs ({settings.tokens} tokens)")  # fmt: skip
    figure.legend(loc="outside lower center", ncols=3, fontsize="small", title="rounded, shift")
    return figure


def _subplots(panels: int, width: float = 13) -> "tuple[Figure, Sequence[Axes]]":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 4.6), dpi=130, layout="constrained")
    return figure, figure.subplots(1, panels, squeeze=False)[0]


def _style(result: ConditionResult) -> dict[str, Any]:
    """Dashed for random weights."""
    return {"linestyle": "--" if result.condition.weights == "random" else "-"}


def _drawn(value: Any) -> float:
    return max(float(value), FLOOR)


def _shift_axis(axes: "Axes", settings: ProbeSettings) -> None:
    """Logarithmic from 10 tokens on, with room for 0."""
    axes.set_xscale("symlog", linthresh=10)
    axes.set_xlim(-1, max(settings.shifts) * 1.5)
    axes.set_xlabel("shift $s_1$ in tokens")
