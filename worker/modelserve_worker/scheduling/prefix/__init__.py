"""The prefix cache: which tokens have been computed before, and where a request may resume."""
