"""A load driver for any OpenAI endpoint: seeded prompts, closed or open loop, streamed answers timed."""
