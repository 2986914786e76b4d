"""Everything that writes to the cluster: by server-side apply, and only where something differs."""
