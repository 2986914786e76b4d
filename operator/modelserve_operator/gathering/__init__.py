"""Everything that reads the cluster: watches, gather, and what is asked for only when it is needed."""
