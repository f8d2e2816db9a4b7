"""The arguments of the run that saved a checkpoint: `training_args.bin`, which every trainer of transformers writes."""

import pickle
import zipfile
from pathlib import Path
from typing import Any


class _Inert:
    """Stands for an object of any class, and has that object's attributes, if there are any."""

    def __init__(self, *args):
        pass


class _InertUnpickler(pickle.Unpickler):
    """Reads attributes only. It imports no class and calls no function that the file names, so any file is safe."""

    def find_class(self, module, name):
        return type(name, (_Inert,), {"__module__": module})

    def persistent_load(self, pid):
        return None


def saved_arguments(checkpoint: str | Path) -> Any:
    """The arguments of the run that saved `checkpoint`; an object without attributes if the file is missing."""
    path = Path(checkpoint) / "training_args.bin"
    if not path.is_file():
        return _Inert()
    with zipfile.ZipFile(path) as archive:
        member = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
        with archive.open(member) as file:
            return _InertUnpickler(file).load()


def processes_of(checkpoint: str | Path) -> int | None:
    """How many processes have saved `checkpoint`; None if it does not say so."""
    state = getattr(saved_arguments(checkpoint), "distributed_state", None)
    return getattr(state, "num_processes", None)
