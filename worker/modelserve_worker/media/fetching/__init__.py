"""Images by address: of hosts that the plan lists, at public addresses, within bounds."""
