"""LoRA adapters as PEFT and tools that write its format store them: settings, names, and what they bind to."""
