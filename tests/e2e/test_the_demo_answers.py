"""The conversation of `make demo`, with the trained checkpoint on the real cluster."""

from __future__ import annotations

import re

import openai

from demo_conversation import RECALL_DISTANCE, REQUEST_TIMEOUT_S, converse
from localcluster.deployment import CHECKPOINT, Deployed
from localcluster.service_access import service_url

NAMESPACE = "modelserve-e2e"


def test_every_answer_of_the_demo_is_right(tiny: Deployed) -> None:
    """converse() raises at the first wrong answer; what it printed shows that nothing was left out."""
    lines: list[str] = []
    with service_url(tiny.target, NAMESPACE, tiny.name) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=REQUEST_TIMEOUT_S)
        converse(client, CHECKPOINT.name, lines.append)
    said = "\n".join(lines)
    assert re.search(r"^    model:   calls \w+ {", said, re.MULTILINE)
    assert re.search(r"^    tool:    \S", said, re.MULTILINE)
    assert re.search(r"^    thought: \S", said, re.MULTILINE)
    prompts = [int(count.replace(",", "")) for count in re.findall(r"([\d,]+) prompt tokens", said)]
    assert max(prompts) >= RECALL_DISTANCE
