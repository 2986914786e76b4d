"""What is decided about one ModelServe: is its spec accepted, which revision is wanted. Pure."""
