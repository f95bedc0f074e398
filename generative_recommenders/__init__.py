"""generative_recommenders: the training stack for DLRMv4 / HSTU rankers."""

__version__ = "0.1.0"
