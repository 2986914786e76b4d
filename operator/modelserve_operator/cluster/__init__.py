"""The Kubernetes API as the operator knows it: kinds, the door to it, the copy of what was heard, and differences."""
