"""Drawing tokens from logits, and looking drafts up in the text so far."""
