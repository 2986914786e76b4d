"""Images of requests: what a spec asks for, and what a plan has for them."""
