"""How lines of the log look, in every process of a worker."""

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
