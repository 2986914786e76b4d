"""HTTP itself: connections, limits, authentication, streams, logs and traces."""
