"""Test set-up: without a GPU, Triton kernels run in the interpreter (which must be set before Triton is imported)."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
torch.set_num_threads(1)


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a CUDA GPU; skipped with a reason elsewhere")
    config.addinivalue_line("markers", "slow: full tier only (scripts/test.sh --full)")


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="also run the slow tier")


def pytest_collection_modifyitems(config, items):
    import pytest

    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
        if "slow" in item.keywords and not config.getoption("--full"):
            item.add_marker(pytest.mark.skip(reason="slow tier: scripts/test.sh --full"))
