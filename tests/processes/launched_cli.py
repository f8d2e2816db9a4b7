"""`liger-trainer` as one CPU process of `accelerate launch`: `launched_cli.py train RECIPE ...`.

Checks what cannot be seen from outside: that FSDP2 was on if the config has it. Exits in the way that is hardest for
gloo's threads: no thread that wants the interpreter's lock gets it before it is released.
"""

import os
import sys

from launching import shard_on_cpus

if __name__ == "__main__":
    sharded = os.environ.get("ACCELERATE_USE_FSDP") == "true"
    if sharded:
        shard_on_cpus()
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType

    from liger_trainer.command.main import main

    sys.setswitchinterval(100)
    code = main()
    if code:
        sys.exit(code)
    expected = DistributedType.FSDP if sharded else DistributedType.MULTI_CPU
    assert AcceleratorState().distributed_type == expected, AcceleratorState().distributed_type
