"""What a ModelServe is told: its status, conditions and metrics. Pure."""
