"""How the tensor-parallel ranks of a worker meet and talk: process group, peer memory, and a ring of messages."""
