"""The Kubernetes API as the operator knows it: kinds, the interface, the copy of what was heard, differences."""
