"""Options that are taken out of a command line before the rest of it goes to TRL's parser."""

import argparse
from collections.abc import Sequence


def take_options(words: Sequence[str], *names: str) -> tuple[dict[str, str], list[str]]:
    """The given values of the options `names`, "" for one without a value, and the other words."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in names:
        spellings = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
        parser.add_argument(*spellings, nargs="?", const="", default=argparse.SUPPRESS)
    given, rest = parser.parse_known_args(list(words))
    return vars(given), rest
