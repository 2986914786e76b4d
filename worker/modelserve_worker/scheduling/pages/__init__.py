"""Pages of the KV cache on the host: who owns them, and which request reads them where."""
