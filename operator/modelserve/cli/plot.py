"""`modelserve plan --plot`: concurrency against context length, one curve per candidate that fits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from modelserve.cli.comparison import PeerCurve
from modelserve.errors import InvalidInput
from modelserve.planning.evaluation import Fit

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHORTEST = 1024
POINTS = 64
LEGEND_ROWS = 30
_LINE_STYLES: dict[int, str] = {0: "-", 1: "-", 2: "--", 4: "-.", 8: ":"}  # by GPUs of a replica


def concurrency_figure(fits: Sequence[Fit], *, title: str, peers: Sequence[PeerCurve] = ()) -> Figure:
    """Requests at once over tokens of each, both logarithmic, up to each candidate's maxModelLen.

    Every one of `fits` is drawn, the first thickest: a colour per product, a line style per number of GPUs; `peers` in
    black. Raises InvalidInput when matplotlib is missing or nothing fits.
    """
    if not fits:
        raise InvalidInput("--plot: no candidate fits, so there is nothing to draw")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter, NullFormatter
    except ImportError as error:
        raise InvalidInput("--plot needs matplotlib: install modelserve[plot]") from error
    curves = len(fits) + len(peers)
    columns = -(-curves // LEGEND_ROWS)
    figure = Figure(figsize=(9 + 3.4 * columns, max(5.5, 0.19 * min(curves, LEGEND_ROWS))), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    products = list(dict.fromkeys(fit.accelerator.product for fit in fits))
    for index, fit in enumerate(fits):
        lengths = _lengths(fit.max_model_len)
        requests = [fit.memory.kv_pool_bytes / fit.geometry.held_bytes(length) for length in lengths]
        axes.plot(
            lengths,
            requests,
            color=f"C{products.index(fit.accelerator.product) % 10}",
            linestyle=_LINE_STYLES.get(fit.gpus, "-"),
            linewidth=2.8 if index == 0 else 1.2,
            label=f"{_label(fit)}{'  (chosen)' if index == 0 else ''}",
        )
    for (name, points), marker in zip(peers, "osv^Dx*+<>" * 3, strict=False):
        axes.plot(*zip(*points, strict=True), color="black", linewidth=1, marker=marker, markersize=4, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = [2**power for power in range(10, 19) if 2**power <= max(fit.max_model_len for fit in fits)]
    axes.set_xticks(ticks, [f"{tick // 1024}k" for tick in ticks])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("tokens of each request")
    axes.set_ylabel("requests at once")
    axes.set_title(title)
    axes.grid(visible=True, which="both", alpha=0.25)
    figure.legend(fontsize="x-small", loc="outside right upper", ncols=columns)
    return figure


def write_figure(figure: Figure, path: Path) -> None:
    """As PNG. Raises InvalidInput when the file cannot be written."""
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
