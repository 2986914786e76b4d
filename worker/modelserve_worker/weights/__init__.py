"""Reading a checkpoint's files into the sharded parameters of one rank."""
