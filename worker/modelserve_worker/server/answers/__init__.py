"""From a validated body to an answer: preparation, running sequences, and the shapes of what is sent."""
