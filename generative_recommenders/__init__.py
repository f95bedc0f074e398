"""generative_recommenders: the training stack for DLRMv4 / HSTU rankers."""

from generative_recommenders._versions import check_installed_pair

__version__ = "0.1.0"

check_installed_pair()
