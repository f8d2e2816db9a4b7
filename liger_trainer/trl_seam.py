"""How our fused head takes the place of TRL's: TRL's trainers call `add_fused_lm_head`, their module's global, at init.

While a Liger trainer is being built that name is ours, so TRL keeps deciding which outputs, temperature and precision
it wants for which model. `tests/liger_trainer/test_contracts.py` fails when a TRL release moves what this stands on.
"""

from contextlib import contextmanager

import trl

from liger_trainer.fused_head import HeadOptions, install_fused_head


class _NoAdapterIsRefused:
    """TRL refuses a PEFT layer as LM head because its head reads `lm_head.weight`; ours calls the module.

    Nothing is an instance.
    """


def _add_fused_lm_head(model, temperature=1.0, cast_lm_head_to_fp32=False, outputs=("log_probs",)):
    install_fused_head(model, HeadOptions(temperature, cast_lm_head_to_fp32, tuple(outputs)))


@contextmanager
def our_head_in(module):
    """Within the block, TRL's trainer module `module` installs our fused head, and takes adapters on the LM head."""
    ours = {"add_fused_lm_head": _add_fused_lm_head, "BaseTunerLayer": _NoAdapterIsRefused}
    missing = [name for name in ours if not hasattr(module, name)]
    if missing:
        raise ImportError(
            f"{module.__name__} of trl {trl.__version__} has no {', '.join(missing)}, on which the fused head stands. "
            'Install trl>=1.16,<2, or set liger_config={"fused_linear_cross_entropy": false}.'
        )
    stock = {name: getattr(module, name) for name in ours}
    for name, value in ours.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in stock.items():
            setattr(module, name, value)
