"""The Gemma 4 engine of modelserve: OpenAI server, scheduler, hybrid paged KV cache, model execution."""
