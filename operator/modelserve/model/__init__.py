"""What a checkpoint is: its geometry, its weights' format and its files."""
