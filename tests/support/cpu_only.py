"""The trainer tests run with no hub, no GPU and one thread, which every conftest.py of theirs imports from here."""

import functools
import gc
import os
import types

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # these tests compare fp32 on CPU; the kernels' own tests use the GPU

import torch  # noqa: E402
from accelerate.utils import memory, modeling  # noqa: E402
from datasets import arrow_dataset, fingerprint  # noqa: E402

torch.set_num_threads(1)

# A fifth of the time of the trainers' tests: PyTorch keeps each seed, with the stack of its call, for GPUs that may yet
# begin, and accelerate reads the metadata of installed packages in each step to learn whether PEFT is one of them.
torch.cuda.traceback = torch.xpu.traceback = torch.mtia.traceback = types.SimpleNamespace(format_stack=list)
modeling.is_peft_available = functools.cache(modeling.is_peft_available)

# A tenth more: rows in memory are pickled for names of caches that no test reads, and training ends in `gc.collect`.
arrow_dataset.generate_fingerprint = lambda dataset: fingerprint.generate_random_fingerprint()
for module in (arrow_dataset, fingerprint):
    module.update_fingerprint = lambda *transform: fingerprint.generate_random_fingerprint()
memory.gc = types.SimpleNamespace(collect=int)


def pytest_collection_finish():
    """What the imports made stays: `Trainer.train` ends in `gc.collect`, which would walk all of it every time."""
    gc.freeze()
