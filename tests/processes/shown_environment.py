"""Prints accelerate's variables of this process, a line each."""

import os

for name, value in sorted(os.environ.items()):
    if name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_")):
        print(f"{name}={value}")
