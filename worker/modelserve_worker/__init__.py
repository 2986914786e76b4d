"""The Gemma 4 engine of modelserve: OpenAI server, scheduler, hybrid paged KV cache, model execution."""

import os
import signal
import sys

# Process 1 of a container ignores every signal it has no handler for. A pod that is deleted while it starts would hold
# its GPU until its grace period is over, so this comes before the other modules are read, which takes a second. The
# server sets handlers of its own later.
if os.getpid() == 1:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
