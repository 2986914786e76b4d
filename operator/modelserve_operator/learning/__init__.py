"""What ready workers report, how it compares with the plan, and where it is kept."""
