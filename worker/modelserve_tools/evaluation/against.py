"""What a served model says beside a reference: the document that --against --json writes, and its tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict

from modelserve.quality.divergence import REST_FLOOR, TokenDivergence
from modelserve_tools.evaluation.columns import Row, columns
from modelserve_tools.evaluation.comparison import Comparison, comparison_table
from modelserve_tools.evaluation.report import Report
from modelserve_tools.evaluation.scores import TOP
from modelserve_tools.evaluation.scoring import CellScores

TokensOf = Literal["answers", "prompts"]


class TokenScores(BaseModel):
    """Over `tokens` of `texts`, in nats but for `top_1_percent`.

    Lower bounds of KL(reference || served) (kl_at_least): their mean, the value that 99 % of the tokens do not exceed,
    and the largest. How often both have the same likeliest token. The mean absolute difference of the log
    probabilities of the tokens themselves.
    """

    model_config = ConfigDict(frozen=True)

    tokens_of: TokensOf
    skill: str | None
    distance: int | None
    texts: int
    tokens: int
    mean_kl: float
    kl_99_percent: float
    most_kl: float
    top_1_percent: float
    mean_shift: float


class AgainstReport(BaseModel):
    """`scores` has all answers and all prompts first, then answers by cell. `left` and `errors` say which texts are
    missing and why. The exercises' comparison has the reference as the first."""

    model_config = ConfigDict(frozen=True)

    format: Literal["modelserve-eval-against/1"] = "modelserve-eval-against/1"
    top: int = TOP
    rest_floor: float = REST_FLOOR
    scores: tuple[TokenScores, ...]
    left: tuple[str, ...]
    errors: int
    reference: Report
    served: Report
    exercises: Comparison

    @property
    def answers_kl(self) -> float | None:
        """The mean over all tokens of answers; None where none was scored."""
        return next((each.mean_kl for each in self.scores if each.tokens_of == "answers" and each.skill is None), None)


def token_scores(cells: Sequence[CellScores]) -> tuple[TokenScores, ...]:
    """All answers, all prompts, and the answers of each cell; nothing of what has no token."""
    texts = sum(cell.texts for cell in cells)
    made = [
        _scores("answers", None, None, texts, (each for cell in cells for each in cell.answers)),
        _scores("prompts", None, None, texts, (each for cell in cells for each in cell.prompts)),
    ]
    made += [_scores("answers", each.cell.skill, each.cell.distance, each.texts, each.answers) for each in cells]
    return tuple(each for each in made if each is not None)


def missing_texts(cells: Sequence[CellScores]) -> tuple[str, ...]:
    """Why texts of a cell were not scored, a line per cell and reason."""
    lines = []
    for each in cells:
        name = each.cell.skill if each.cell.distance is None else f"{each.cell.skill} at {each.cell.distance}"
        if each.left is not None:
            lines.append(f"{name}: not scored: {each.left}")
        elif each.errors:
            lines.append(f"{name}: {each.errors} texts failed, the first: {each.first_error}")
    return tuple(lines)


def against_table(report: AgainstReport) -> str:
    """Both endpoints, the divergences, what is missing, then the exercises side by side."""
    headings = ("TOKENS OF", "SKILL", "DISTANCE", "TEXTS", "TOKENS", "MEAN KL", "99 %", "MOST", "TOP-1 %", "SHIFT")
    lines = columns(headings, [_row(each) for each in report.scores], text_columns=2)
    exercises = comparison_table(report.exercises).splitlines()
    return "\n".join(
        [
            *exercises[:2],
            "",
            f"KL(A || B) in nats a token, at least: {report.top} likeliest tokens and the rest as one",
            "",
            *lines,
            *(["", *report.left] if report.left else []),
            *exercises[2:],
        ]
    )


def _scores(
    tokens_of: TokensOf,
    skill: str | None,
    distance: int | None,
    texts: int,
    found: Iterable[TokenDivergence],
) -> TokenScores | None:
    listed = list(found)
    if not listed:
        return None
    n, divergences = len(listed), sorted(each.kl for each in listed)
    return TokenScores(
        tokens_of=tokens_of, skill=skill, distance=distance, texts=texts, tokens=n,
        mean_kl=math.fsum(divergences) / n,
        kl_99_percent=divergences[math.ceil(0.99 * n) - 1],
        most_kl=divergences[-1],
        top_1_percent=100 * sum(each.same for each in listed) / n,
        mean_shift=math.fsum(each.shift for each in listed) / n,
    )  # fmt: skip


def _row(each: TokenScores) -> Row:
    where = "all" if each.skill is None else each.skill, "-" if each.distance is None else str(each.distance)
    figures = [f"{value:.2e}" if value else "0" for value in (each.mean_kl, each.kl_99_percent, each.most_kl)]
    shift = f"{each.mean_shift:.2e}" if each.mean_shift else "0"
    return Row(
        (each.tokens_of, *where, str(each.texts), str(each.tokens), *figures, f"{each.top_1_percent:.1f}", shift)
    )
