"""The engine loop and its asynchronous client for the server. Torch-free."""
