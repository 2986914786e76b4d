"""Grammars to matchers, in the engine's process: compiled in threads, kept while they are in use, followed in parallel.

The library's compilation and its masks run without Python's lock, so the loop goes on with steps meanwhile. The first
mask of a grammar is computed with it, and the masks of answers for which a step would wait too long (`mask_time.py`)
beside the steps of all others.
"""

from __future__ import annotations

import json
import os
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from modelserve.errors import InvalidInput
from modelserve.sizing.host.grammars import MOST_LEXER_STATES
from modelserve_worker.grammar.limits import DOCUMENT_PART, parser_limits, part_names
from modelserve_worker.grammar.mask_time import DEAR_S, MaskTime
from modelserve_worker.grammar.matcher import GrammarMatcher, is_allowed
from modelserve_worker.grammar.thinking_budget import BudgetedThought
from modelserve_worker.grammar.unique_keys import TokenTable, UniqueKeys
from modelserve_worker.request import GRAMMAR_FIELD, Request, TokenConstraint

_COMPILED_GRAMMARS = 64  # kept for requests to come
_COMPILER_THREADS = 2
_MOST_MASK_THREADS = 8
_IN_NO_TEXT = "\ufdd0"  # never a character


@dataclass(frozen=True)
class CompiledGrammar:
    """A grammar before its first token, and the mask of that, int32 [ceil(vocab / 32)]."""

    matcher: LLMatcher
    first_mask: NDArray[np.int32]
    dear: bool
    free_names: bool


class GrammarCompiler:
    """Compiles grammars for one tokenizer, and computes the masks of a step. One thread calls it."""

    def __init__(
        self,
        tokenizer_json: str,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        max_lexer_states: int = MOST_LEXER_STATES,
    ) -> None:
        """`tokenizer_json` is the text of that file. Takes 2.4 s of one core for a vocabulary of 262,144. Raises
        InvalidInput for a tokenizer that the library does not read."""
        try:
            self._tokenizer = LLTokenizer(
                _spelling_no_control_token(tokenizer_json), n_vocab=vocab_size, eos_token=list(eos_token_ids)
            )
        except (ValueError, LookupError, TypeError) as error:
            raise InvalidInput(f"tokenizer.json: {error}", field="tokenizer.json") from error
        self._eos_token_ids = tuple(eos_token_ids)
        self._words = -(-vocab_size // 32)
        self._max_lexer_states = max_lexer_states
        self._table = TokenTable([self._bytes_of(token_id) for token_id in range(vocab_size)])
        self._threads = ThreadPoolExecutor(_COMPILER_THREADS, thread_name_prefix="grammar-compiler")
        self._compiled: OrderedDict[str, Future[CompiledGrammar]] = OrderedDict()
        self._shares = max(1, min(_MOST_MASK_THREADS, len(os.sched_getaffinity(0)) - 1))
        self._mask_time = MaskTime(self._shares)
        self._masking = ThreadPoolExecutor(self._shares, thread_name_prefix="token-masks")
        self._background = ThreadPoolExecutor(max(1, self._shares // 2), thread_name_prefix="dear-token-masks")

    def compile(self, grammar: str) -> Future[CompiledGrammar]:
        """The grammar's matcher before the first token; the same future for a grammar that was compiled lately.

        The future raises InvalidInput where the grammar is none.
        """
        future = self._compiled.pop(grammar, None) or self._threads.submit(self._compile, grammar)
        self._compiled[grammar] = future
        if len(self._compiled) > _COMPILED_GRAMMARS:
            self._compiled.popitem(last=False)
        return future

    def matcher(
        self, compiled: CompiledGrammar, *, stop_token_ids: Sequence[int], ignore_eos: bool, min_tokens: int
    ) -> GrammarMatcher:
        """A matcher for one answer."""
        return GrammarMatcher(
            compiled.matcher,
            first_mask=compiled.first_mask,
            dear=compiled.dear,
            mask_time=self._mask_time,
            background=self._background,
            unique_keys=UniqueKeys(self._table) if compiled.free_names else None,
            eos_token_ids=self._eos_token_ids,
            stop_token_ids=[token_id for token_id in stop_token_ids if token_id < self._words * 32],
            ignore_eos=ignore_eos,
            min_tokens=min_tokens,
        )

    def constraint(self, request: Request, compiled: CompiledGrammar | None) -> TokenConstraint | None:
        """What holds a request's answer to its grammar, which is `compiled`, and to its thinking budget."""
        sampling, constraint = request.sampling, None
        if compiled is not None:
            constraint = self.matcher(
                compiled,
                stop_token_ids=sampling.stop_token_ids,
                ignore_eos=sampling.ignore_eos,
                min_tokens=sampling.min_tokens,
            )
        if request.thinking_budget is not None:
            return BudgetedThought(request.thinking_budget, constraint)
        return constraint

    def masks(self, constrained: Sequence[tuple[TokenConstraint | None, Sequence[int]]]) -> NDArray[np.int32]:
        """Masks int32 [C, ceil(vocab / 32)] of the tokens that may follow, for each of `constrained` the first and then
        one behind each of its drafts; all tokens for None, behind a draft that may not follow itself, and where a
        constraint fails, which its `error` then tells.

        The constraints are left as they were.
        """
        self._mask_time.begin_step()
        ends = np.cumsum([1 + len(drafts) for _, drafts in constrained]).tolist()
        masks = np.full((ends[-1] if ends else 0, self._words), -1, dtype=np.int32)
        live = [
            (constraint, end - 1 - len(drafts), drafts)
            for (constraint, drafts), end in zip(constrained, ends, strict=True)
            if constraint is not None
        ]
        proposed = [(constraint, row) for constraint, row, _ in live]
        counts = dict.fromkeys((row for _, row in proposed), 0)
        first = {id(constraint): row for constraint, row in proposed}
        while live:
            self._fill(masks, [(constraint, row) for constraint, row, _ in live])
            live = [
                (constraint, row + 1, drafts[1:])
                for constraint, row, drafts in live
                if drafts and is_allowed(masks[row], drafts[0]) and constraint.propose(drafts[0])
            ]
            for constraint, *_ in live:
                counts[first[id(constraint)]] += 1
        for constraint, row in proposed:
            if counts[row]:
                constraint.roll_back(counts[row])
        return masks

    def _fill(self, masks: NDArray[np.int32], live: Sequence[tuple[TokenConstraint, int]]) -> None:
        """Rows of `masks` by what may follow in each now."""
        shares = min(self._shares, len(live))
        if shares <= 1:  # not worth waking a thread
            _write(live, masks)
        else:
            list(self._masking.map(lambda share: _write(live[share::shares], masks), range(shares)))

    def _compile(self, grammar: str) -> CompiledGrammar:
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits(grammar))
        mask = np.empty(self._words, dtype=np.int32)
        began = time.thread_time()
        if not matcher.is_error():
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if matcher.is_error():
            raise InvalidInput(f"the grammar of the answer: {matcher.get_error()}", field=GRAMMAR_FIELD)
        dear = time.thread_time() - began > DEAR_S
        return CompiledGrammar(matcher, mask, dear, free_names=DOCUMENT_PART in part_names(grammar))

    def _limits(self, grammar: str) -> LLParserLimits:
        return parser_limits(grammar, max_lexer_states=self._max_lexer_states)

    def _bytes_of(self, token_id: int) -> bytes:
        """Empty for a control token."""
        return b"" if self._tokenizer.is_special_token(token_id) else self._tokenizer.decode_bytes([token_id])


def _write(matchers: Sequence[tuple[TokenConstraint, int]], masks: NDArray[np.int32]) -> None:
    for matcher, row in matchers:
        matcher.mask(masks[row])


def _spelling_no_control_token(tokenizer_json: str) -> str:
    """The tokenizer with its control tokens under names that no text spells; a grammar names them by id.

    Where only one text may follow, the library asks for the tokens that the tokenizer makes of it. A control token
    among them would not match, so a schema that names <unk> would end every answer with an error.
    """
    tokenizer = json.loads(tokenizer_json)
    model = tokenizer["model"]
    names = {}
    for token in tokenizer.get("added_tokens") or []:
        if token["special"]:
            names[token["content"]] = token["content"] = _IN_NO_TEXT + token["content"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(piece, piece): token_id for piece, token_id in model["vocab"].items()}
        _leave_one_text_each(model)
    else:
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
    if model.get("unk_token") is not None:
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    return json.dumps(tokenizer | {"post_processor": None}, ensure_ascii=False)


def _leave_one_text_each(model: dict[str, Any]) -> None:
    """Take second texts of an id out of a BPE model, and what is merged of them: the library counts texts for tokens.

    Gemma's tokenizers call <0x09> a tab, too.
    """
    texts = {token_id: piece for piece, token_id in model["vocab"].items()}
    if len(texts) == len(model["vocab"]):
        return
    kept = model["vocab"] = {piece: token_id for token_id, piece in texts.items()}
    pairs = (merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"])
    model["merges"] = [pair for pair in pairs if pair[0] in kept and pair[1] in kept and "".join(pair) in kept]
