"""Text in, token ids out, and back: tokenizer, chat template, incremental detokenizer, stop strings. Torch-free."""
