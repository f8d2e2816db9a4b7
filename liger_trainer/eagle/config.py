"""`LigerEagleConfig`: the arguments of `LigerEagleTrainer`."""

from dataclasses import dataclass, field

from liger_trainer.trainers.sft_trainer import LigerSFTConfig


@dataclass
class LigerEagleConfig(LigerSFTConfig):
    """[`LigerSFTConfig`] with the options of an EAGLE-3 drafter, for [`LigerEagleTrainer`].

    The loss, with N the labels in the accumulated batch over all ranks and p_k what the drafter guesses k steps ahead:

        L = sum over k = 1..K of decay^(k - 1) * sum over t of KL(q_{t+k} || p_{k,t}) / N

    q is the target's own distribution for the same token, restricted to the draft vocabulary. A guess counts if its
    token has a label and is in the draft vocabulary. Li et al. 2025, arXiv:2503.01840, section 3.2.

    Raises:
        ValueError: A field is out of its range.
    """

    eagle_steps: int = field(
        default=7, metadata={"help": "K, how many tokens the drafter guesses from each token in training."}
    )
    eagle_decay: float = field(
        default=0.8, metadata={"help": "Step k weighs decay to the power of k - 1. Above 0, at most 1."}
    )
    eagle_draft_vocab_size: int = field(
        default=32000,
        metadata={
            "help": "How many tokens the drafter can guess: the most frequent ones in the labels of the training rows. "
            "With the model's vocabulary size or more, all tokens."
        },
    )
    eagle_layers: list[int] | None = field(
        default=None,
        metadata={
            "help": "The three hidden states that the drafter reads; number i is the input of layer i. Unset: 2, half "
            "of the layers, and the number of layers minus 3, as in servers."
        },
    )
    eagle_intermediate_size: int | None = field(
        default=None, metadata={"help": "Width of the drafter's MLP. Unset: the model's intermediate_size."}
    )
    eagle_init_from: str | None = field(
        default=None,
        metadata={
            "help": "Train this drafter further: the output directory of an earlier EAGLE training, or a folder with a "
            "published drafter. Its shape and its draft vocabulary stay."
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("eagle_steps", "eagle_draft_vocab_size", "eagle_intermediate_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; expected 1 or more.")
        if not 0 < self.eagle_decay <= 1:
            raise ValueError(f"eagle_decay is {self.eagle_decay}; expected a number above 0 and at most 1.")
        shape_fields = {"eagle_layers": self.eagle_layers, "eagle_intermediate_size": self.eagle_intermediate_size}
        set_fields = [name for name, value in shape_fields.items() if value is not None]
        if self.eagle_init_from is not None and set_fields:
            raise ValueError(
                f"eagle_init_from is {self.eagle_init_from!r}, and its drafter has its own shape, but {set_fields[0]} "
                f"is set. Remove {set_fields[0]}."
            )
