"""A mixture of experts: routing, and products of rows with the experts that they chose."""
