"""`liger-trainer` as one of the CPU processes of `accelerate launch`: `launched_cli.py train RECIPE ...`.

Afterwards it checks what cannot be seen from outside: that FSDP2 was on where the config has it, and that under DDP no
thread of gloo's is left, which could abort the process while the interpreter ends.
"""

import os
import sys
from pathlib import Path

from launching import shard_on_cpus

if __name__ == "__main__":
    sharded = os.environ.get("ACCELERATE_USE_FSDP") == "true"
    if sharded:
        shard_on_cpus()
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType

    from liger_trainer.cli import main

    if code := main():
        sys.exit(code)
    expected = DistributedType.FSDP if sharded else DistributedType.MULTI_CPU
    assert AcceleratorState().distributed_type == expected, AcceleratorState().distributed_type
    threads = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    assert sharded or not any("gloo" in name for name in threads), threads
    sys.stdout.flush()
    os._exit(0)  # PyTorch's caches keep the mesh of FSDP2, and that keeps gloo's threads
