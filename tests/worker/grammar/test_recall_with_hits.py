"""Trained checkpoints recall as much from rows that another request computed as from their own: everything."""

from __future__ import annotations

import pytest
import torch
from trained_answers import MODELS, TrainedModel

from modelserve_tools.evaluation.skills import exercise

DISTANCE = 300  # tokens: many windows of both checkpoints, whose recall at 1,000 is 100 % (docs/evaluation.md)


@pytest.mark.parametrize(
    ("name", "dtype"), [("gemma4-tiny-ple", "auto"), ("gemma4-tiny-keqv", "auto"), ("gemma4-tiny-keqv", "int8")]
)
def test_what_others_computed_is_recalled(name: str, dtype: str) -> None:
    """Each document is read by a request with another question, which every later one resumes behind."""
    model = TrainedModel(MODELS / name, kv_cache_dtype=dtype, max_num_batched_tokens=256)
    for skill in ("recall", "needle"):
        for index in range(2):
            asked = exercise(skill, seed=11, index=index, distance=DISTANCE)
            (message,) = asked.messages
            notes, ask, key = str(message["content"]).rpartition("Complete: ")
            for question in ("amber fox", key, key):
                messages = [{**message, "content": notes + ask + question}]
                (spec,) = model.chat(messages=messages, temperature=0.0, max_tokens=16)
                with torch.inference_mode():
                    (reply,) = model.run([spec])
                if question != key:
                    continue
                assert reply.content == asked.answer.content
                assert spec.request.cached_tokens >= len(reply.prompt_token_ids) - 16, "behind the notes"
