"""Trainings with `optimizer_in_backward` and without, of one seed, and what is compared of them."""

from auto_runs import build, train

OPTIONS = {"max_steps": 8, "gradient_accumulation_steps": 1, "max_grad_norm": 0.0, "weight_decay": 0.1}


def make(out, in_backward, checkpointing=False, **options):
    return build(out, checkpointing, optimizer_in_backward=in_backward, **(OPTIONS | options))


def logs_of(trainer):
    """What each step has logged, without times."""
    names = ("loss", "grad_norm", "learning_rate", "eval_loss")
    return [{name: log[name] for name in names if name in log} for log in trainer.state.log_history]


def same_training(out, **options):
    """Train in both ways. Asserts that losses, norms, learning rates, weights and states are the same to the bit."""
    made = []
    for in_backward in (False, True):
        given = {
            name: value() if name in ("model", "memory", "callbacks") else value for name, value in options.items()
        }
        trainer = make(out / str(in_backward), in_backward, **given)
        _, weights = train(trainer)
        made.append((logs_of(trainer), weights, states_of(trainer)))
    ordinary, ours = made
    assert ours[0] == ordinary[0] and len(ours[0]) >= 3
    assert all(log["grad_norm"] > 0 for log in ours[0] if "loss" in log)
    assert ours[1].keys() == ordinary[1].keys()
    for kind in (1, 2):
        assert ours[kind].keys() == ordinary[kind].keys()
        different = [name for name, value in ours[kind].items() if not equal(value, ordinary[kind][name])]
        assert not different
    return ordinary, ours


def states_of(trainer):
    """The state of each weight, by its name."""
    names = {weight: name for name, weight in trainer.model.named_parameters()}
    return {
        (names[weight], kind): value
        for weight, state in trainer.optimizer.state.items()
        for kind, value in state.items()
    }


def equal(got, want):
    same = got == want
    return bool(same.all()) if hasattr(same, "all") else bool(same)
