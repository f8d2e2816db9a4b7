"""The trainer tests run with no hub, no GPU and one thread, which every conftest.py of theirs imports from here."""

import gc
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # these tests compare fp32 on CPU; the kernels' own tests use the GPU

import torch  # noqa: E402

torch.set_num_threads(1)


def pytest_collection_finish():
    """What the imports made stays: `Trainer.train` ends in `gc.collect`, which would walk all of it every time."""
    gc.freeze()
