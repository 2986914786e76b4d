"""One rank's model runner: launches packed steps, replays captured ones, and hands their tokens back."""
