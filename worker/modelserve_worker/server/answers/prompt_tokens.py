"""From the text of a prompt to token ids that the model has, or the answer that says why not."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from modelserve_worker.server.errors.errors import ApiError
from modelserve_worker.server.state import ServedModel
from modelserve_worker.text.prompt_encoder import InvalidTextError, TooManyTokensError

CONTEXT_EXCEEDED = "This model's maximum context length is {} tokens."  # OpenAI's words, by which clients fall back
CONTEXT_CODE = "context_length_exceeded"


def encode(
    text: str,
    model: ServedModel,
    *,
    param: str,
    add_special_tokens: bool,
    most_tokens: int,
    salt: str | None,
    mark: int = 0,
) -> tuple[array[int], int]:
    """Token ids, and how many of them lie before the character `mark`. Raises ApiError."""
    try:
        token_ids, before = model.text.encoder.encode_marked(
            text,
            mark,
            add_special_tokens=add_special_tokens,
            most_tokens=most_tokens,
            namespace=f"{model.tenant}\0{salt or ''}",
        )
    except InvalidTextError as error:
        raise invalid_text(param) from error
    except TooManyTokensError as error:
        raise too_many_tokens(error.at_least, most_tokens, param=param) from error
    if not token_ids:
        raise ApiError(f"{param} is empty; it needs at least one token", param=param)
    # Some checkpoints have tokenizers with added tokens that the model has no embedding for.
    require_in_vocabulary(token_ids, model, param=param)
    return token_ids, before


def too_many_tokens(at_least: int, limit: int, *, param: str) -> ApiError:
    """The answer to a prompt, or a prediction, that does not fit the context."""
    if param == "prediction.content":
        return ApiError(
            f"{param} has at least {at_least} tokens; the limit is {limit} tokens. Shorten it",
            param=param, code=CONTEXT_CODE,
        )  # fmt: skip
    return ApiError(
        f"{CONTEXT_EXCEEDED.format(limit)} The prompt has at least {at_least} tokens. Shorten it",
        param=param, code=CONTEXT_CODE,
    )  # fmt: skip


def invalid_text(param: str) -> ApiError:
    """The answer to text that no UTF-8 holds."""
    return ApiError(f"{param} holds half of a surrogate pair; send valid Unicode", param=param)


def require_in_vocabulary(token_ids: Sequence[int], model: ServedModel, *, param: str) -> None:
    """Raises ApiError for an id that the model has no embedding for."""
    # Of an array without an object per token; a list may hold what no array does.
    largest = int(np.max(token_ids)) if isinstance(token_ids, array) else max(token_ids, default=0)
    if largest >= model.vocab_size:
        raise ApiError(
            f"token id {largest} is outside the vocabulary; ids go from 0 to {model.vocab_size - 1}", param=param
        )
