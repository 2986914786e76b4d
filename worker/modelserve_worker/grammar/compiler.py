"""Grammars to matchers, in the engine's process: compiled in threads, kept while they are in use, followed in parallel.

The library's compilation and its masks run without Python's lock, so the loop goes on with steps meanwhile.
"""

from __future__ import annotations

import json
import logging
import os
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from numpy.typing import NDArray

from modelserve.errors import InvalidInput
from modelserve_worker.grammar.limits import parser_limits
from modelserve_worker.grammar.matcher import GrammarMatcher
from modelserve_worker.request import TokenConstraint

_COMPILED_GRAMMARS = 64  # kept for requests to come
_COMPILER_THREADS = 2
_MOST_MASK_THREADS = 8
_IN_NO_TEXT = "\ufdd0"  # never a character

logger = logging.getLogger(__name__)


class GrammarCompiler:
    """Compiles grammars for one tokenizer, and computes the masks of a step. One thread calls it."""

    def __init__(self, tokenizer_json: Path, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """Takes 2.4 s of one core for a vocabulary of 262,144. Raises InvalidInput that names the file."""
        try:
            self._tokenizer = LLTokenizer(
                _spelling_no_control_token(tokenizer_json), n_vocab=vocab_size, eos_token=list(eos_token_ids)
            )
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise InvalidInput(f"{tokenizer_json}: {error}", field="tokenizer.json") from error
        self._eos_token_ids = tuple(eos_token_ids)
        self._words = -(-vocab_size // 32)
        self._threads = ThreadPoolExecutor(_COMPILER_THREADS, thread_name_prefix="grammar-compiler")
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._executor = LLExecutor(num_threads=max(1, min(_MOST_MASK_THREADS, len(os.sched_getaffinity(0)) - 1)))

    def compile(self, grammar: str) -> Future[LLMatcher]:
        """The grammar's matcher before the first token; the same future for a grammar that was compiled lately.

        The future raises InvalidInput where the grammar is none.
        """
        future = self._compiled.pop(grammar, None) or self._threads.submit(self._compile, grammar)
        self._compiled[grammar] = future
        if len(self._compiled) > _COMPILED_GRAMMARS:
            self._compiled.popitem(last=False)
        return future

    def matcher(
        self, compiled: LLMatcher, *, stop_token_ids: Sequence[int], ignore_eos: bool, min_tokens: int
    ) -> GrammarMatcher:
        """A matcher for one answer."""
        return GrammarMatcher(
            compiled.deep_copy(),
            eos_token_ids=self._eos_token_ids,
            stop_token_ids=[token_id for token_id in stop_token_ids if token_id < self._words * 32],
            ignore_eos=ignore_eos,
            min_tokens=min_tokens,
        )

    def masks(self, matchers: Sequence[TokenConstraint | None]) -> NDArray[np.int32]:
        """Masks int32 [C, ceil(vocab / 32)] of the tokens that may follow; all tokens for None, and where a matcher
        fails, which its `error` then tells.

        The constraints are those of `matcher`.
        """
        masks = np.full((len(matchers), self._words), -1, dtype=np.int32)
        live = [(matcher, row) for row, matcher in enumerate(matchers) if isinstance(matcher, GrammarMatcher)]
        together = len(live) > 1 and self._compute_together(live, masks)  # one is not worth waking a thread
        for matcher, row in live:
            if not together:
                matcher.compute(masks[row])
            matcher.adjust(masks[row])
        return masks

    def _compute_together(self, live: Sequence[tuple[GrammarMatcher, int]], masks: NDArray[np.int32]) -> bool:
        """False where one of them failed; which one it was is found by computing each by itself."""
        try:
            self._executor.unsafe_compute_mask_ptr(
                [(matcher.matcher, row) for matcher, row in live], masks.ctypes.data, masks.strides[0], len(masks)
            )
        except Exception:
            logger.exception("masks of %d answers cannot be computed together", len(live))
            return False
        return True

    def _compile(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=parser_limits(grammar))
        if matcher.is_error():
            raise InvalidInput(f"the grammar of the answer: {matcher.get_error()}", field="structured_outputs")
        return matcher


def _spelling_no_control_token(tokenizer_json: Path) -> str:
    """The tokenizer with its control tokens under names that no text spells; a grammar names them by id.

    Where only one text may follow, the library asks for the tokens that the tokenizer makes of it. A control token
    among them would not match, so a schema that names <unk> would end every answer with an error.
    """
    tokenizer = json.loads(tokenizer_json.read_text(encoding="utf-8"))
    model = tokenizer["model"]
    names = {}
    for token in tokenizer.get("added_tokens") or []:
        if token["special"]:
            names[token["content"]] = token["content"] = _IN_NO_TEXT + token["content"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(piece, piece): token_id for piece, token_id in model["vocab"].items()}
    else:
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
    if model.get("unk_token") is not None:
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    return json.dumps(tokenizer | {"post_processor": None}, ensure_ascii=False)
