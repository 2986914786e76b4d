"""What is used around the engine and is no part of it: the download of checkpoints, checkpoints of random weights, the
evaluation of answers, the load driver."""
