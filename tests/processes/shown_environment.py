"""Print accelerate's variables of this process, one a line."""

import os

for name, value in sorted(os.environ.items()):
    if name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_")):
        print(f"{name}={value}")
