"""What drafts beside a model: MTP assistants, and the DFlash family, whose drafters draft a block at once."""
