"""What a reference said, text by text: from the endpoint while it is asked, or from a file that was recorded of it."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from modelserve_tools.evaluation.report import Report, ReportError
from modelserve_tools.evaluation.scores import TOP, Logprob

Document = TypeVar("Document", bound=BaseModel)


class ReferenceText(BaseModel):
    """One exercise's prompt and the greedy answer to it as token ids, and a row of log probabilities by token id for
    each token but the first. `skill`, `distance` and `index` say which exercise it is, with the recording's seed."""

    model_config = ConfigDict(frozen=True)

    skill: str
    distance: int | None
    index: int = Field(ge=0)
    prompt: tuple[int, ...] = Field(min_length=1)
    answer: tuple[int, ...]
    rows: tuple[dict[int, Logprob], ...]


class RecordingHead(BaseModel):
    model_config = ConfigDict(frozen=True)

    format: Literal["modelserve-eval-reference/1"] = "modelserve-eval-reference/1"
    base_url: str
    model: str
    seed: int
    top: int = TOP


class RecordingEnd(BaseModel):
    """The last line: what the reference made of the exercises. A recording without it was interrupted."""

    report: Report


class RecordingWriter:
    """Lines of JSON, compressed: a head, the texts as they come, the end."""

    def __init__(self, path: Path, head: RecordingHead) -> None:
        self._file: IO[str] = gzip.open(path, "wt", compresslevel=5)  # noqa: SIM115 - closed by `__exit__`
        self._line(head)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def text(self, text: ReferenceText) -> None:
        self._line(text)

    def end(self, report: Report) -> None:
        self._line(RecordingEnd(report=report))

    def _line(self, document: BaseModel) -> None:
        self._file.write(document.model_dump_json() + "\n")


class Recording:
    """A recorded reference. Texts are read one at a time, as they are wanted."""

    def __init__(self, path: Path) -> None:
        """Reads the head and the end, and so every line once. Raises ReportError."""
        self._path = path
        lines = self._lines()
        self.head = self._parsed(RecordingHead, next(lines, ""), line=1)
        last, self.count = "", -1
        for line in lines:
            last = line
            self.count += 1
        if not last.startswith('{"report"'):
            raise ReportError(f"{path}: the recording ends early; record it again")
        self.report = self._parsed(RecordingEnd, last, line=self.count + 2).report

    def texts(self) -> Iterator[ReferenceText]:
        """In the order of the recording. Raises ReportError."""
        lines = self._lines()
        next(lines)
        for number in range(self.count):
            text = self._parsed(ReferenceText, next(lines), line=number + 2)
            tokens = (*text.prompt, *text.answer)
            rows_fit = len(text.rows) == len(tokens) - 1
            if not rows_fit or any(token not in row for token, row in zip(tokens[1:], text.rows, strict=True)):
                raise ReportError(f"{self._path}: line {number + 2}: its rows are not those of its tokens")
            yield text

    def _lines(self) -> Iterator[str]:
        try:
            with gzip.open(self._path, "rt") as file:
                yield from file
        except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
            what = getattr(error, "strerror", None) or str(error)
            raise ReportError(
                f"{self._path}: {what}; name a file that --record wrote, or the URL of an endpoint"
            ) from error

    def _parsed(self, document: type[Document], text: str, *, line: int) -> Document:
        try:
            return document.model_validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]["msg"]
            raise ReportError(f"{self._path}: line {line}: {first}; name a file that --record wrote") from error
