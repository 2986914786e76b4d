"""What an 8-bit cache would cost these weights, measured by an idle worker."""
