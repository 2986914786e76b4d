"""The fields that OpenAI, Anthropic and vLLM document for a request body: none may be missing in docs/fields.md.

OpenAI's are read from its installed package. The others' packages are not installed where the tests run.
"""

from __future__ import annotations

from openai.types import completion_create_params as completions
from openai.types.audio import transcription_create_params as transcriptions
from openai.types.audio import translation_create_params as translations
from openai.types.chat import completion_create_params as chat
from openai.types.responses import response_create_params as responses

VLLM = frozenset(
    {"use_beam_search", "top_k", "min_p", "repetition_penalty", "length_penalty", "stop_token_ids", "bad_words"}
    | {"include_stop_str_in_output", "ignore_eos", "min_tokens", "skip_special_tokens", "spaces_between_special_tokens"}
    | {"truncate_prompt_tokens", "allowed_token_ids", "prompt_logprobs", "add_special_tokens", "response_format"}
    | {"structured_outputs", "priority", "request_id", "logits_processors", "return_tokens_as_token_ids"}
    | {"return_token_ids", "cache_salt", "kv_transfer_params", "vllm_xargs", "echo", "detokenize"}
)
VLLM_CHAT = frozenset(
    {"add_generation_prompt", "continue_final_message", "documents", "chat_template", "chat_template_kwargs"}
    | {"mm_processor_kwargs", "media_io_kwargs", "include_reasoning"}
)
# anthropic 2.12.0, types/message_create_params.py and types/beta/message_create_params.py
ANTHROPIC = frozenset(
    {"betas", "billing_policy", "cache_control", "compaction", "container", "context_management", "diagnostics"}
    | {"fallback_credit_token", "fallbacks", "inference_geo", "max_tokens", "mcp_servers", "messages", "metadata"}
    | {"model", "output_config", "output_format", "prefill", "service_tier", "speed", "stop_sequences", "stream"}
    | {"system", "temperature", "thinking", "thread", "tool_choice", "tools", "top_k", "top_p", "user_profile_id"}
    | {"workspace_id"}
)
COMPLETIONS = frozenset(completions.CompletionCreateParamsBase.__annotations__) | {"stream"} | VLLM
CHAT = frozenset(chat.CompletionCreateParamsBase.__annotations__) | {"stream"} | VLLM | VLLM_CHAT
TRANSCRIPTIONS = (
    frozenset(transcriptions.TranscriptionCreateParamsBase.__annotations__)
    | frozenset(translations.TranslationCreateParams.__annotations__)
    | {
        "stream",
        "stream_include_usage",
        "stream_continuous_usage_stats",
        "seed",
        "to_language",
    }  # of vLLM the last four
)
RESPONSES = frozenset(responses.ResponseCreateParamsBase.__annotations__) | {"stream"}
