"""What the trainer tests share: no hub, one thread, tiny models with random weights, ragged rows."""

import gc
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # these tests compare fp32 on CPU; the kernels' own tests use the GPU

import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)


def pytest_collection_finish():
    """What the imports made stays: `Trainer.train` ends in `gc.collect`, which would walk all of it every time."""
    gc.freeze()


@pytest.fixture
def tiny():
    """`tiny(model_type, **config)`: a two-layer random model, from one seed."""
    from tiny_models import tiny_model

    return tiny_model
