"""The OpenAI-compatible HTTP server. It knows the engine only as `EngineClient`. Torch-free."""
