"""What products hold beside their inputs and results, by the rows of the registry that a rank may launch."""

from __future__ import annotations

from functools import lru_cache

from modelserve.model.architecture import ModelArchitecture
from modelserve.sizing.backends.generations import GENERATIONS
from modelserve.sizing.backends.resolve import Formats, resolve
from modelserve.sizing.backends.table import Operation
from modelserve.sizing.rank_settings import Profile, RankSettings


def product_bytes(architecture: ModelArchitecture, settings: RankSettings) -> int:
    """Bytes of one rank on a GPU whose kernels multiply: what products share, each buffer once, and the most that the
    rows of one product have for themselves. Of a GPU that is not known, what the generation takes that takes most."""
    known = settings.capability
    return max(
        _product_bytes(
            architecture,
            Formats(settings.weight_format),
            capability,
            settings.profile,
            ranks=settings.tensor_parallel_size,
            rows=settings.step_rows,
        )
        for capability in ([generation.lowest for generation in GENERATIONS] if known is None else [known])
    )


@lru_cache(maxsize=512)
def _product_bytes(
    architecture: ModelArchitecture, formats: Formats, capability: int, profile: Profile, *, ranks: int, rows: int
) -> int:
    buffers, own = dict[str, int](), 0
    table = resolve(capability, architecture, formats, profile, ranks=ranks)
    for operation, subject, shape in {(each.operation, each.subject, each.shape) for each in table.choices}:
        if operation not in (Operation.LINEAR, Operation.GROUPED):
            continue
        below = 0  # rows that choices before this one take
        for choice in table.of(operation, subject, shape):
            if below >= rows:
                break
            below = rows if choice.most_rows is None else choice.most_rows
            own = max(own, choice.row_bytes * min(below, rows))
            if choice.workspace_bytes:
                buffers[choice.buffer] = max(buffers.get(choice.buffer, 0), choice.workspace_bytes)
    return sum(buffers.values()) + own
