"""Vectors and matrices are refused by name and shape, and vectors come out with neighbouring elements."""

import pytest
import torch

from generative_recommenders.ops.checks import matrix, vector


def test_vector():
    strided = torch.arange(6.0).view(3, 2)[:, 0]
    got = vector("weight", strided, 3)
    assert got.stride() == (1,) and got.tolist() == [0.0, 2.0, 4.0]
    for shape in ((2,), (1,), (3, 1), ()):
        with pytest.raises(ValueError, match=r"weight must be \[3\]"):
            vector("weight", torch.zeros(shape), 3)


def test_matrix():
    rows = torch.zeros(4, 6)
    assert matrix("rows", rows, 6) is rows and matrix("rows", rows, 6, 4) is rows
    for columns, count in ((5, None), (6, 3), (12, 4)):
        with pytest.raises(ValueError, match="rows must be"):
            matrix("rows", rows, columns, count)
    with pytest.raises(ValueError, match="rows must be"):
        matrix("rows", rows.view(2, 2, 6), 6)
