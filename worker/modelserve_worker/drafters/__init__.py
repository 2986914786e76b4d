"""What proposes tokens that may follow: an MTP assistant, or a lookup in the request's own text."""
