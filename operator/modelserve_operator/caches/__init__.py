"""What becomes of one ModelCache: the snapshot, the decision, objects and status. Pure."""
