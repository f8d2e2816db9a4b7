"""`python -m liger_trainer` and `accelerate launch -m liger_trainer`: the same command as `liger-trainer`."""

import sys

from liger_trainer.command.main import main

if __name__ == "__main__":
    sys.exit(main())
