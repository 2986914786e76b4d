"""Which revisions run with how many pods, which moves when, and which pods are spared. Pure."""
