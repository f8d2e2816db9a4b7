"""A user's script under torchrun without a GPU that does not set use_cpu: `trains_apart.py OUT_DIR`."""

import sys

from tiny_models import collate, ragged_rows, tiny_model

from liger_trainer import LigerTrainer, LigerTrainingArguments

if __name__ == "__main__":
    args = LigerTrainingArguments(
        output_dir=sys.argv[1], max_steps=1, report_to="none", remove_unused_columns=False, save_strategy="no"
    )
    LigerTrainer(model=tiny_model("llama"), args=args, train_dataset=ragged_rows(4), data_collator=collate).train()
    print("trained")
