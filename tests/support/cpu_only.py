"""Run trainer tests without hub or GPU and on one thread. Each conftest.py of theirs imports this first."""

import functools
import gc
import os
import types

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # these tests compare fp32 on the CPU; the kernels' tests use the GPU

import torch  # noqa: E402
from accelerate.utils import imports, memory, modeling  # noqa: E402
from datasets import arrow_dataset, fingerprint  # noqa: E402

torch.set_num_threads(1)

# Saves a fifth of the trainer tests' time. PyTorch keeps each seed and its call stack for GPUs that may start later,
# and accelerate searches for packages in each step to find out whether PEFT and DeepSpeed are among them.
torch.cuda.traceback = torch.xpu.traceback = torch.mtia.traceback = types.SimpleNamespace(format_stack=list)
modeling.is_peft_available = functools.cache(modeling.is_peft_available)
imports._is_package_available = functools.cache(imports._is_package_available)

# Saves another tenth: rows in memory are pickled for cache names that no test reads, and training ends in `gc.collect`.
arrow_dataset.generate_fingerprint = lambda dataset: fingerprint.generate_random_fingerprint()
for module in (arrow_dataset, fingerprint):
    module.update_fingerprint = lambda *transform: fingerprint.generate_random_fingerprint()
memory.gc = types.SimpleNamespace(collect=int)


def pytest_collection_finish():
    """Freeze what the imports made. Otherwise the `gc.collect` at the end of `Trainer.train` walks all of it."""
    gc.freeze()
