"""The table client x feature x result of docs/clients.md: what is expected, which the tests hold every client to.

`python tests/clients/client_table.py` writes it into the page. A cell that does not work has its reason in FAILURES;
when it works, the test says so and the entry must go.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "clients.md"
BEGIN, END = "<!-- table: python tests/clients/client_table.py -->\n", "<!-- end of the table -->\n"

COLUMNS = {
    "chat": "chat",
    "stream": "streamed",
    "tools": "tools",
    "tools_stream": "tools streamed",
    "structured": "structured",
    "reasoning": "thoughts",
    "responses": "Responses",
    "messages": "Messages",
    "completions": "completions",
    "loglikelihood": "loglikelihood",
    "overflow": "context overflow seen",
}
_TOOLS = ("chat", "stream", "tools", "tools_stream")
_REPLAYED = ("chat", "completions")


@dataclass(frozen=True)
class Client:
    """`script` runs in `environment` ("node" or the suffix of a requirements file) and tells its `features`.

    `version` is a package of that environment, or the version itself where only its requests are replayed.
    """

    name: str
    script: str
    environment: str
    version: str
    features: tuple[str, ...]
    arguments: tuple[str, ...] = field(default=())


CLIENTS = (
    Client("openai (Python)", "openai_python", "openai3", "openai", (*_TOOLS, "structured", "reasoning", "responses")),
    Client("openai (Node)", "openai_node", "node", "openai", (*_TOOLS, "structured", "reasoning", "responses")),
    Client(
        "anthropic (Python), over Messages", "anthropic_python", "openai3", "anthropic",
        (*_TOOLS, "structured", "reasoning"),
    ),
    Client(
        "LangChain", "langchain_client", "openai3", "langchain-openai", (*_TOOLS, "structured", "responses")
    ),
    Client(
        "LangChain, `create_agent`", "langchain_agent", "openai3", "langchain",
        ("tools", "tools_stream", "structured", "responses"),
    ),
    Client(
        "LiteLLM `openai/`", "litellm_client", "openai2", "litellm",
        (*_TOOLS, "structured", "reasoning", "overflow"), ("openai",)
    ),
    Client(
        "LiteLLM `hosted_vllm/`", "litellm_client", "openai2", "litellm",
        (*_TOOLS, "structured", "reasoning", "overflow"),
        ("hosted_vllm",),
    ),
    Client("LlamaIndex", "llama_index_client", "openai2", "llama-index-core", (*_TOOLS, "structured")),
    Client("dspy", "dspy_client", "openai2", "dspy", ("chat", "structured")),
    Client("instructor, forced call", "instructor_client", "openai2", "instructor", ("structured",), ("call",)),
    Client("instructor, JSON", "instructor_client", "openai2", "instructor", ("structured",), ("JSON",)),
    Client(
        "instructor, parallel calls", "instructor_client", "openai2", "instructor", ("structured",), ("parallel calls",)
    ),
    Client("instructor, Markdown", "instructor_client", "openai2", "instructor", ("structured",), ("Markdown",)),
    Client(
        "pydantic-ai", "pydantic_ai_client", "openai3", "pydantic-ai-slim",
        (*_TOOLS, "structured", "responses", "messages"),
    ),
    Client("openai-agents", "openai_agents", "openai3", "openai-agents", (*_TOOLS, "structured", "responses")),
    Client("smolagents", "smolagents_client", "openai3", "smolagents", ("chat", "stream", "tools")),
    Client("Vercel AI", "vercel_ai", "node", "ai", (*_TOOLS, "structured", "reasoning")),
    Client("lm-eval", "lm_eval_client", "openai2", "lm-eval", ("chat", "completions", "loglikelihood")),
    Client("guidellm (payloads replayed)", "benchmark_payloads", "openai3", "0.8.1", _REPLAYED, ("guidellm",)),
    Client("aiperf (payloads replayed)", "benchmark_payloads", "openai3", "0.13.0", _REPLAYED, ("aiperf",)),
    Client("vllm bench (payloads replayed)", "benchmark_payloads", "openai3", "at 02cfb53", _REPLAYED, ("vllm bench",)),
)  # fmt: skip


@dataclass(frozen=True)
class Reason:
    """Why a cell does not work, and what the client's error must say for that to be the reason."""

    text: str
    error: str


FAILURES: dict[str, dict[str, Reason]] = {}


def requirements(environment: str) -> Path:
    return HERE / f"requirements-{environment}.txt"


def _version(client: Client) -> str:
    if client.environment == "node":
        pinned: str = json.loads((HERE / "node" / "package.json").read_text())["dependencies"][client.version]
        return pinned
    found = re.search(rf"^{re.escape(client.version)}==(\S+)", requirements(client.environment).read_text(), re.M)
    return found[1] if found else client.version


def render() -> str:
    """The table and the reasons of its cells, as Markdown."""
    reasons = list(dict.fromkeys(reason for cells in FAILURES.values() for reason in cells.values()))
    lines = [
        f"| client | version | {' | '.join(COLUMNS.values())} |",
        f"|---|---|{'---|' * len(COLUMNS)}",
    ]
    for client in CLIENTS:
        failures = FAILURES.get(client.name, {})
        cells = []
        for feature in COLUMNS:
            if feature not in client.features:
                cells.append("")
            else:
                cells.append(f"no ({reasons.index(failures[feature]) + 1})" if feature in failures else "ok")
        lines.append(f"| {client.name} | {_version(client)} | {' | '.join(cells)} |")
    lines += ["", *(f"{number}. {reason.text}." for number, reason in enumerate(reasons, start=1))]
    return "\n".join(lines) + "\n"


def main() -> None:
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    PAGE.write_text(before + BEGIN + "\n" + render() + "\n" + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
