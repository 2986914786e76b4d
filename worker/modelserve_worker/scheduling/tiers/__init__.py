"""Host memory behind the prefix cache: pages that are spilled there and restored."""
