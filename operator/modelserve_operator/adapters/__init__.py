"""What becomes of the ModelAdapters of one ModelServe: the snapshot, the decision, objects and statuses. Pure."""
