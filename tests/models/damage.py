"""What the harness sees of four faults: exact match and divergence of the engine, right and damaged.

    python tests/models/damage.py --checkpoint tests/models/gemma4-tiny-keqv [--n 50] [--device cuda] [--dtype bfloat16]

Prints Markdown. Every figure is teacher-forced through the paged path. Divergence is KL(reference || engine) in nats,
the mean over the positions of the answers; the reference is transformers in float32. Its noise floor is the larger
divergence of the intact engine at two chunk sizes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from mutations import MUTATIONS, Mutation
from rendering import Rendered
from teacher_forcing import (
    DTYPES,
    EngineLogits,
    TransformersLogits,
    checkpoint_renderer,
    divergence,
    is_exact,
    render_cell,
)
from torch import Tensor

from modelserve_tools.evaluation.cells import Cell
from modelserve_tools.evaluation.short_skills import SHORT_SKILLS

CHUNK, OTHER_CHUNK = 512, 192
LEAST_FALL = 5.0  # points of exact match
LEAST_RISE = 10.0  # times the noise floor

Groups = Mapping[str, Sequence[Rendered]]


@dataclass(frozen=True)
class Score:
    """Exact match in per cent and mean divergence in nats of one group of exercises."""

    exact: float
    divergence: float


@dataclass(frozen=True)
class Row:
    """One mutation over one group of exercises. `floor` is the noise floor of the group, in nats."""

    mutation: str
    group: str
    n: int
    before: Score
    after: Score
    floor: float

    @property
    def points(self) -> float:
        return self.after.exact - self.before.exact

    @property
    def rise(self) -> float:
        """The damaged engine's divergence as a multiple of the noise floor."""
        return self.after.divergence / self.floor


@dataclass(frozen=True)
class Table:
    """Rows of one dtype. The first of them compare the intact engine at two chunk sizes."""

    dtype: str
    rows: tuple[Row, ...]

    def verdicts(self) -> list[Verdict]:
        """One for each mutation that was run."""
        found = []
        for mutation in MUTATIONS:
            rows = [row for row in self.rows if row.mutation == mutation.name]
            if rows:
                found.append(Verdict(mutation, min(row.points for row in rows), max(row.rise for row in rows)))
        return found


@dataclass(frozen=True)
class Verdict:
    """The largest fall of exact match in any group, in points (negative), and the largest rise of divergence."""

    mutation: Mutation
    points: float
    rise: float

    @property
    def caught(self) -> bool:
        """Exact match falls far enough, or, where other layers may mask the fault, divergence rises far enough."""
        return self.points <= -LEAST_FALL or (self.mutation.maskable and self.rise >= LEAST_RISE)

    def __str__(self) -> str:
        what = "caught" if self.caught else "NOT caught"
        return f"{self.mutation.name}: {what}, {self.points:+.1f} points, KL {self.rise:.2g} times the noise floor"


class Damage:
    """Runs of one checkpoint over the same exercises; the reference is computed once."""

    def __init__(self, directory: Path, groups: Groups, *, device: torch.device) -> None:
        self._directory = directory
        self._groups = groups
        self._device = device
        reference = TransformersLogits(directory, dtype=torch.float32, device=device)
        self._reference = {name: reference(asked) for name, asked in groups.items()}

    def table(self, dtype: str, *, progress: Callable[[str], None]) -> Table:
        """Every mutation that the model can have, with weights, activations and rows in `dtype`."""
        engine = EngineLogits(self._directory, dtype=DTYPES[dtype], device=self._device, chunk=CHUNK, max_num_seqs=32)
        before = self._scores(engine)
        engine.chunk = OTHER_CHUNK
        other = self._scores(engine)
        engine.chunk = CHUNK
        floor = {name: max(before[name].divergence, other[name].divergence) for name in self._groups}
        runs = {f"none, chunks of {OTHER_CHUNK} tokens": other}
        for mutation in applicable(engine):
            progress(f"{dtype}: {mutation.name}")
            runs[mutation.name] = self._scores(engine, mutation)
        rows = (
            Row(mutation, group, len(self._groups[group]), before[group], score, floor[group])
            for mutation, scores in runs.items()
            for group, score in scores.items()
        )
        return Table(dtype, tuple(rows))

    def _scores(self, engine: EngineLogits, mutation: Mutation | None = None) -> dict[str, Score]:
        with mutation.applied(engine.model) if mutation else nullcontext():
            return {name: score(asked, self._reference[name], engine(asked)) for name, asked in self._groups.items()}


def applicable(engine: EngineLogits) -> list[Mutation]:
    k_eq_v = engine.model.architecture.attention_k_eq_v
    return [mutation for mutation in MUTATIONS if k_eq_v or not mutation.needs_k_eq_v]


def score(asked: Sequence[Rendered], reference: Sequence[Tensor], logits: Sequence[Tensor]) -> Score:
    right = sum(is_exact(rendered, rows) for rendered, rows in zip(asked, logits, strict=True))
    lost = torch.cat([divergence(true, rows) for true, rows in zip(reference, logits, strict=True)])
    return Score(100 * right / len(asked), float(lost.mean()))


def exercise_groups(
    directory: Path, *, distances: Sequence[int], n: int, n_short: int, seed: int
) -> dict[str, list[Rendered]]:
    """`n` recall questions at each distance, `n` lookbacks, and `n_short` of each other short skill together."""
    renderer = checkpoint_renderer(directory)
    groups = {f"recall at {d}": render_cell(renderer, Cell("recall", d, n), seed=seed) for d in distances}
    groups["lookback"] = render_cell(renderer, Cell("lookback", None, n), seed=seed)
    others = [render_cell(renderer, Cell(s, None, n_short), seed=seed) for s in SHORT_SKILLS if s != "lookback"]
    return groups | {"other short skills": [rendered for cell in others for rendered in cell]}


def markdown(table: Table) -> str:
    """The rows, and under them a line for each mutation that says whether it is caught."""
    lines = [
        f"| mutation ({table.dtype}) | exercises | n | exact %, right | damaged | points | KL | noise floor | ratio |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {row.mutation} | {row.group} | {row.n} | {row.before.exact:.1f} | {row.after.exact:.1f} "
        f"| {row.points:+.1f} | {row.after.divergence:.2g} | {row.floor:.2g} | {row.rise:.2g} |"
        for row in table.rows
    ]
    return "\n".join([*lines, "", *(f"- {verdict}" for verdict in table.verdicts())])


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables; 1 when a mutation is not caught in some dtype."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--n", type=int, default=50, help="exercises per distance and short skill (default 50)")
    parser.add_argument(
        "--distances", type=lambda text: [int(part) for part in text.split(",")], default=[100, 400, 1500],
        help="of recall, in tokens (default 100,400,1500)",
    )  # fmt: skip
    parser.add_argument("--dtype", choices=DTYPES, help="default: one table for each")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    if options.n < 1:
        parser.error(f"--n {options.n}: ask at least 1 exercise")
    groups = exercise_groups(
        options.checkpoint, distances=options.distances, n=options.n, n_short=options.n, seed=options.seed
    )
    damage = Damage(options.checkpoint, groups, device=options.device)
    caught = True
    for dtype in [options.dtype] if options.dtype else DTYPES:
        table = damage.table(dtype, progress=lambda what: print(what, file=sys.stderr, flush=True))
        print(markdown(table), end="\n\n", flush=True)
        caught &= all(verdict.caught for verdict in table.verdicts())
    return 0 if caught else 1


if __name__ == "__main__":
    sys.exit(main())
