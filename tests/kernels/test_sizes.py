"""Contexts that change how operations run."""

import pytest
import torch

from liger_triton._chunks import chunk_size
from liger_triton.sizes import chunks_of_at_most


def test_chunks_of_at_most_bounds_each_chunk_and_ends_with_its_context():
    sizes = (64, 1000, torch.float32, "cpu")
    assert chunk_size(*sizes) == 64
    with chunks_of_at_most(5):
        assert chunk_size(*sizes) == 5
        with chunks_of_at_most(2):
            assert chunk_size(*sizes) == 2
        assert chunk_size(*sizes) == 5
    assert chunk_size(*sizes) == 64
    with pytest.raises(ValueError, match="rows is 0"), chunks_of_at_most(0):
        pass
