"""The engine loop and its asynchronous door for the server. Torch-free."""
