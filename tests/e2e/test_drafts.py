"""spec.drafter on the real cluster: an assistant on the claim is read, planned and mounted, and its drafts accepted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from localcluster.checkpoint_upload import upload_checkpoint
from localcluster.deployment import CHECKPOINT, Deployed, apply_example
from localcluster.operator_process import OperatorProcess
from localcluster.service_access import service_url
from localcluster.target import Target

NAMESPACE = "modelserve-e2e"
TARGET, ASSISTANT = "gemma4-tiny-keqv", "gemma4-tiny-keqv-assistant"
QUESTION: Any = [{"role": "user", "content": "Repeat: apple river stone cloud"}]


@pytest.fixture
def drafted(cluster: Target, operator: OperatorProcess) -> Iterator[Deployed]:
    for name in (TARGET, ASSISTANT):
        upload_checkpoint(cluster, NAMESPACE, CHECKPOINT.parent / name)
    made = apply_example(
        cluster, NAMESPACE, "drafted", model={"uri": f"pvc://weights/{TARGET}"}, context={"maxModelLen": 1024},
        drafter={"uri": f"pvc://weights/{ASSISTANT}", "numSpeculativeTokens": 4},
    )  # fmt: skip
    yield made
    made.kubectl.delete("modelserve", "drafted")


def test_an_assistant_named_in_the_spec_drafts(drafted: Deployed) -> None:
    drafted.wait_ready()
    plan = drafted.status()["plan"]
    assert plan["drafter"] == {"uri": f"pvc://weights/{ASSISTANT}", "numSpeculativeTokens": 4}
    with service_url(drafted.target, NAMESPACE, "drafted") as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=60)
        answer = client.chat.completions.create(model=TARGET, messages=QUESTION, max_tokens=16, temperature=0)
    assert answer.usage is not None
    details = answer.usage.completion_tokens_details
    assert details is not None
    assert (details.accepted_prediction_tokens or 0) > 0
    assert answer.choices[0].message.content == "apple river stone cloud"
