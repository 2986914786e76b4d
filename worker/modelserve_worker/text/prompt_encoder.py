"""Turns text into token ids: says where control tokens may come from, and how many tokens are worth the work.

A control token (`<|turn>`, `<bos>`, ...) is made only where a template, or the raw prompt of a completion, spells one.
What a request says inside a conversation is text, whatever it spells: `guarded` puts half of a surrogate pair, which no
valid text holds, behind every character that may begin a marker. The guarded marker passes through the template as
text, is no marker when the rendered text is split, and the guard is gone before its piece is encoded. Pieces between
control tokens are encoded with the tokenizer's own search for them switched off. For text without markers the ids are
those of the whole rendered text encoded at once, since a tokenizer cuts at control tokens first, too.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer, models

from modelserve.sizing.host.front_end import KNOWN_TEXTS_BYTES
from modelserve_worker.text.known_pieces import KnownPieces

GUARD = "\udc01"
_BYTES_PER_TOKEN = 6  # honest text has fewer, so a piece with more is encoded in parts first
_NO_MARKER = "\ufdd0"  # stands for the guard where text must be valid
_REST = "?"  # in the splitter: whatever is no control token


class TooManyTokensError(Exception):
    """The text has at least `at_least` tokens, which is more than were allowed."""

    def __init__(self, at_least: int) -> None:
        super().__init__(f"at least {at_least} tokens")
        self.at_least = at_least


class InvalidTextError(ValueError):
    """Half of a surrogate pair: JSON can spell it, UTF-8 cannot."""


class PromptEncoder:
    """Encodes with `tokenizer`, whose own handling of special tokens it switches off for good.

    `longest_token_bytes`: no token stands for more bytes of text. `known_bytes`: of texts whose ids are remembered. All
    methods may be called from any thread.
    """

    def __init__(self, tokenizer: Tokenizer, *, longest_token_bytes: int, known_bytes: int = KNOWN_TEXTS_BYTES) -> None:
        self._longest_token_bytes = longest_token_bytes
        with_ends = tokenizer.encode("a", add_special_tokens=True).ids
        bare = tokenizer.encode("a", add_special_tokens=False).ids
        begin = next(at for at in range(len(with_ends)) if with_ends[at : at + len(bare)] == bare)
        self._before, self._behind = with_ends[:begin], with_ends[begin + len(bare) :]
        tokenizer.encode_special_tokens = True
        tokenizer.no_padding()  # or the ids of a text would hang on those beside it
        tokenizer.no_truncation()
        self._tokenizer = tokenizer
        self._known = KnownPieces(known_bytes)
        control = {
            token.content: token_id
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if token.special and token.content
        }
        self._guarded = {text[0]: text[0] + GUARD for text in control}
        # The tokenizers library finds all markers at once, the longest first, and lets other threads run meanwhile.
        self._splitter = Tokenizer(models.WordLevel({_REST: 0}, unk_token=_REST))
        self._splitter.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in control])
        self._control = {self._splitter.token_to_id(text): (text, token_id) for text, token_id in control.items()}

    def guarded(self, value: Any) -> Any:
        """`value` with every text in it, keys of objects included, made unable to become a control token.

        Raises InvalidTextError for text that already holds a guard.
        """
        if isinstance(value, str):
            if GUARD in value:
                raise InvalidTextError
            for begin, guarded in self._guarded.items():
                value = value.replace(begin, guarded)
            return value
        if isinstance(value, Mapping):
            return {self.guarded(key): self.guarded(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self.guarded(inner) for inner in value]
        return value

    def encode(self, text: str, *, add_special_tokens: bool, most_tokens: int) -> tuple[int, ...]:
        """Token ids of `text`, guards left out; `add_special_tokens` puts the tokenizer's own at both ends.

        Raises InvalidTextError, and TooManyTokensError as soon as it is certain that there are more than `most_tokens`.
        """
        ids, _ = self.encode_marked(text, 0, add_special_tokens=add_special_tokens, most_tokens=most_tokens)
        return tuple(ids)

    def encode_marked(
        self, text: str, mark: int, *, add_special_tokens: bool, most_tokens: int, namespace: str = ""
    ) -> tuple[array[int], int]:
        """The same, and how many of the tokens lie before the character `mark`, or before the text between control
        tokens in which it is. What was encoded in the same `namespace` is not encoded again. Raises what `encode` does.
        """
        try:
            num_bytes = len(text.replace(GUARD, "").encode())
        except UnicodeEncodeError as error:
            raise InvalidTextError from error
        self._require(-(-num_bytes // self._longest_token_bytes), most_tokens)
        pieces = self._split(text, most_tokens)
        texts = [piece for piece, _ in pieces if isinstance(piece, str)]
        for each in texts:
            self._require_few(each, most_tokens)
        encoded = self._encoded(texts, namespace)
        ids = array("i", self._before if add_special_tokens else ())
        before = 0
        for piece, end in pieces:
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids += encoded[piece]
            if end <= mark:
                before = len(ids)
        if add_special_tokens:
            ids.extend(self._behind)
        return ids, before

    def _encoded(self, texts: list[str], namespace: str) -> dict[str, array[int]]:
        """The ids of each text."""
        found = {text: self._known.find(namespace, text) for text in texts}
        missing = [text for text, ids in found.items() if ids is None]
        made = self._tokenizer.encode_batch_fast(missing, add_special_tokens=False) if missing else []
        for text, encoding in zip(missing, made, strict=True):
            found[text] = ids = array("i", encoding.ids)
            self._known.keep(namespace, text, ids)
        return {text: ids for text, ids in found.items() if ids is not None}

    def _split(self, text: str, most_tokens: int) -> list[tuple[str | int, int]]:
        """Texts without guards, and the ids of the control tokens between them, each with the place where it ends."""
        # A batch of one: `encode` holds the interpreter while it works, `encode_batch_fast` lets other threads run.
        (found,) = self._splitter.encode_batch_fast([text.replace(GUARD, _NO_MARKER)], add_special_tokens=False)
        self._require(len(found) // 2, most_tokens)  # at least every second one is a control token
        pieces: list[tuple[str | int, int]] = []
        at = 0
        for found_id in found.ids:
            if found_id not in self._control:
                continue
            marker, token_id = self._control[found_id]
            begin = text.index(marker, at)  # the splitter passes over no marker, so the next one is the one it found
            if begin > at:
                pieces.append((text[at:begin].replace(GUARD, ""), begin))
            at = begin + len(marker)
            pieces.append((token_id, at))
        if at < len(text):
            pieces.append((text[at:].replace(GUARD, ""), len(text)))
        return [(piece, end) for piece, end in pieces if piece != ""]

    def _require_few(self, piece: str, most_tokens: int) -> None:
        """Count a piece that is long for its allowance in parts. Where a part is cut, tokens may be split in two."""
        if len(piece) <= _BYTES_PER_TOKEN * most_tokens // 4:  # 4 bytes a character at most
            return
        if len(piece.encode()) <= _BYTES_PER_TOKEN * most_tokens:
            return
        counted = 0
        for begin in range(0, len(piece), most_tokens):
            (part,) = self._tokenizer.encode_batch_fast([piece[begin : begin + most_tokens]], add_special_tokens=False)
            counted += len(part)
            self._require(counted // 2, most_tokens)

    @staticmethod
    def _require(at_least: int, most_tokens: int) -> None:
        if at_least > most_tokens:
            raise TooManyTokensError(at_least)
