"""The preview at apply: a process of its own that answers admission reviews with warnings, and refuses nothing."""
