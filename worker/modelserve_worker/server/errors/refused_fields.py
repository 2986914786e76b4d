"""Fields of other servers that clients send: why each is refused, or what to send here instead."""

from __future__ import annotations

from collections.abc import Mapping

_CHAT_ONLY = "it is a field of /v1/chat/completions"
_ONE_BACKEND = "there is one way to constrain an answer here; leave it out"
_NOT_HERE = "the server calls nothing itself; offer a function as a tool"
_ONE_PLACE = "the server runs where it was deployed; choose by its address"
_WHITE_SPACE = "white space between the parts of a document is bounded by the server"
_NOTHING_KEPT = "this server keeps nothing between requests; send the whole conversation"

REFUSED_FIELDS: Mapping[str, str] = {
    "tools": _CHAT_ONLY,
    "tool_choice": _CHAT_ONLY,
    "parallel_tool_calls": _CHAT_ONLY,
    "top_logprobs": _CHAT_ONLY,
    "reasoning_effort": _CHAT_ONLY,
    "functions": "use tools",
    "function_call": "use tools, with tool_choice for the request and tool_calls in messages",
    "audio": "this server does not speak; sounds are parts of messages",
    "image": "images are parts of messages",
    "verbosity": "the model has no such setting; ask for it in a message",
    "web_search_options": _NOT_HERE,
    "moderation": "this server moderates nothing; ask a model that does",
    "best_of": "use n and choose among the answers",
    "suffix": "insertion is not supported; put everything into the prompt",
    "echo": "it is a field of /v1/completions",
    "documents": "the model's format has no place for them; put them into a message",
    "include_reasoning": "thoughts come whenever the model thinks; reasoning_effort none keeps it from thinking",
    "use_beam_search": "answers are sampled; use n",
    "length_penalty": "it belongs to beam search, which is not there",
    "early_stopping": "it belongs to beam search, which is not there",
    "typical_p": "use top_p or min_p",
    "top_a": "use top_p or min_p",
    "bad_words": "use logit_bias",
    "allowed_token_ids": "use logit_bias, or structured_outputs",
    "logits_processors": "no code of a client runs here",
    "truncate_prompt_tokens": "nothing is cut; send a prompt that fits",
    "detokenize": "answers are text; return_tokens_as_token_ids names the tokens of log probabilities",
    "return_token_ids": "return_tokens_as_token_ids names those of log probabilities; /tokenize has those of a prompt",
    "priority": "there is one class of service",
    "mm_processor_kwargs": _CHAT_ONLY,
    "media_io_kwargs": "images are read in one way; detail and max_soft_tokens say how closely",
    "kv_transfer_params": "caches are not passed between servers",
    "vllm_xargs": "they belong to extensions of another server",
    "chat_template": "the checkpoint's own chat template is used; chat_template_kwargs sets its variables",
    "guided_json": 'use structured_outputs: {"json": SCHEMA}',
    "guided_json_object": 'use response_format: {"type": "json_object"}',
    "guided_regex": 'use structured_outputs: {"regex": EXPRESSION}',
    "guided_choice": 'use structured_outputs: {"choice": [TEXT, ...]}',
    "guided_grammar": 'use structured_outputs: {"grammar": GRAMMAR}',
    "guided_decoding_backend": _ONE_BACKEND,
    "guided_whitespace_pattern": _WHITE_SPACE,
    "disable_any_whitespace": _WHITE_SPACE,
    "whitespace_pattern": _WHITE_SPACE,
    "disable_fallback": _ONE_BACKEND,
    "access_programs": "it concerns accounts of another service",
    "background_options": "answers are not kept; use stream",
    "container": _NOT_HERE,
    "mcp_servers": _NOT_HERE,
    "inference_geo": _ONE_PLACE,
    "speed": _ONE_PLACE,
    "diagnostics": "the server's log and metrics have them",
    "previous_response_id": _NOTHING_KEPT,
    "conversation": _NOTHING_KEPT,
    "prompt": "stored prompts are not supported; send messages, or instructions and input",
    "background": "answers are not kept; use stream",
    "context_management": "the server cuts nothing from a conversation; shorten it",
    "compaction": "the server cuts nothing from a conversation; shorten it",
    "thread": _NOTHING_KEPT,
    "fallbacks": "one model is served",
    "fallback_credit_token": "it concerns accounts of another service",
    "billing_policy": "it concerns accounts of another service",
    "prefill": "begin the answer with a last message of the assistant",
    "output_format": 'use output_config: {"format": FORMAT}',
    "betas": "they are a header of another service; leave them out",
}
