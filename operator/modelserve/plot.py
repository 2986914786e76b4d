"""`modelserve plan --plot`: concurrency against context length, one curve per candidate that fits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from modelserve.errors import InvalidInput
from modelserve.planning.evaluation import Fit

SHORTEST = 1024
POINTS = 64
MAX_CURVES = 12


def plot_concurrency(fits: Sequence[Fit], path: Path, *, title: str) -> None:
    """Draw requests at once over tokens of each, both logarithmic, up to each candidate's maxModelLen.

    The best MAX_CURVES of `fits` are drawn; they come best first. Raises InvalidInput when matplotlib is missing, the
    file cannot be written or nothing fits.
    """
    if not fits:
        raise InvalidInput("--plot: no candidate fits, so there is nothing to draw")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InvalidInput("--plot needs matplotlib: install modelserve[plot]") from error
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for index, fit in enumerate(fits[:MAX_CURVES]):
        lengths = _lengths(fit.max_model_len)
        requests = [fit.memory.kv_pool_bytes / fit.geometry.held_bytes(length) for length in lengths]
        axes.plot(
            lengths,
            requests,
            color=f"C{index % 10}",
            linestyle="-" if index < 10 else "--",
            linewidth=2.4 if index == 0 else 1.4,
            label=f"{_label(fit)}{'  (chosen)' if index == 0 else ''}",
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = [2**power for power in range(10, 19) if 2**power <= max(fit.max_model_len for fit in fits)]
    axes.set_xticks(ticks, [f"{tick // 1024}k" for tick in ticks])
    axes.set_xlabel("tokens of each request")
    axes.set_ylabel("requests at once")
    axes.set_title(title)
    axes.grid(visible=True, which="both", alpha=0.25)
    axes.legend(fontsize="small")
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise InvalidInput(f"--plot: cannot write {path}: {error.strerror}") from error


def _label(fit: Fit) -> str:
    number = f"{fit.gpus} x " if fit.gpus else ""
    return f"{number}{fit.accelerator.product}, {fit.geometry.dtype} {fit.geometry.layout}"


def _lengths(longest: int) -> list[int]:
    """Lengths from SHORTEST to the longest, evenly spaced on a logarithmic axis."""
    first = min(SHORTEST, longest)
    return sorted({round(first * (longest / first) ** (step / (POINTS - 1))) for step in range(POINTS)})
