"""Request bodies of the API, field by field, and schemas of the answers."""
