"""Skills with exact answers and the harness that measures them over an OpenAI API. The server never imports it."""
