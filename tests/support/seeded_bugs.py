"""Put a bug into a trainer while `verify` runs, and the names of the checks of `verify`."""

import pytest
from transformers import Trainer
from verify_setups import failed

from liger_trainer.head.deferred import DeferredLogits

LOSSES = "losses and gradient norm"
GRADIENTS = "gradients"
UPDATES = "updates of weights"
TRAINS = "what trains"
NORMS = "norms in 16 bits"
PACKED = "packed rows = separate rows"
PADDED = "padded rows = unpadded rows"
SPLIT = "accumulation 1 x 4 = 4 x 1"
REFERENCE = "reference model"
MERGED = "adapter merged = applied"
RESUMED = "saved and resumed = uninterrupted"
LOGGED = "every logged number"
CHUNKS = "head in chunks = in one"
LEFT = "padding on the left"
DROPOUT = "dropout drawn once"
ADAM_LOGS = "Adam, 2 epochs: logs"
ADAM_GRADIENTS = "Adam, 2 epochs: gradients"
ADAM_WEIGHTS = "Adam, 2 epochs: weights, states"
SEEN = "Adam, 2 epochs: what is seen"
EVALUATION = "evaluation"
UNCHANGED = "evaluation changes nothing"
SAVED = "model as saved"
GATES = "gates in 16 bits"
HEAD = "head in 16 bits"
BF16 = "training in bf16"


def in_the_head(**changes):
    """Call the fused loss with other arguments than it should get."""

    def seed(patch):
        stock = DeferredLogits.fused

        def fused(self, function, *args, **kwargs):
            return stock(self, lambda hidden, **own: function(hidden, **(own | changes)), *args, **kwargs)

        patch.setattr(DeferredLogits, "fused", fused)

    return seed


def once_built(module, name, faulty):
    """Replace a function of ours by `faulty` while a trainer trains, but not during the earlier proofs."""

    def seed(patch):
        stock = getattr(module, name)
        init = Trainer.__init__
        train = Trainer.train
        built = []

        def initialised(self, *args, **kwargs):
            built.clear()
            init(self, *args, **kwargs)

        def trained(self, *args, **kwargs):
            built.append(True)
            train(self, *args, **kwargs)

        patch.setattr(Trainer, "__init__", initialised)
        patch.setattr(Trainer, "train", trained)
        patch.setattr(module, name, lambda *a, **k: faulty(stock, *a, **k) if built else stock(*a, **k))

    return seed


def of_a_trainer(cls, name, faulty):
    """Replace a method by `faulty(stock method, self, ...)`."""

    def seed(patch):
        stock = getattr(cls, name)
        patch.setattr(cls, name, lambda self, *args, **kwargs: faulty(stock, self, *args, **kwargs))

    return seed


def cases(seeds, quick=None):
    """The parameters of `assert_found` for each seed; those that do not start with `quick` are slow."""
    return [
        pytest.param(*seeded, id=name, marks=() if quick and name.startswith(quick) else pytest.mark.slow)
        for name, seeded in seeds.items()
    ]


def setups(seeds):
    """Each setup of the seeds, once."""
    found = {}
    for _, what, parts, _ in seeds.values():
        found.setdefault(str((what, parts)), (what, parts))
    return list(found.values())


def assert_found(seed, what, parts, found_by, monkeypatch):
    seed(monkeypatch)
    assert found_by <= failed(*what, **parts).keys()


def assert_clean(what, parts):
    assert failed(*what, **parts) == {}
