"""Plans of models that see."""
