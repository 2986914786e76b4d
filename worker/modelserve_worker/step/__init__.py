"""What a step is on the device: packed rows, block tables, sampling parameters, and the tokens drawn at its end."""
