"""`python -m liger_trainer` and `accelerate launch -m liger_trainer`: they run the command `liger-trainer`."""

import sys

from liger_trainer.command.main import main

if __name__ == "__main__":
    sys.exit(main())
