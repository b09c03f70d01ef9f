"""transformers' Trainer with DeepSpeed and Muon: DeepSpeed's config for TrainingArguments, and the optimizer factory.

One process:  deepspeed --num_gpus 1 examples/hf_deepspeed.py
Two ranks:    torchrun --nproc-per-node 2 examples/hf_deepspeed.py

On a CPU: DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 examples/hf_deepspeed.py
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.utils.data import Dataset

# [start:recipe]
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from shardmuon.frameworks.transformers import MuonFactory

DEEPSPEED = {
    "zero_optimization": {"stage": 2},
    "gradient_clipping": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    # The config must not have an "optimizer" section. The next two settings allow optimizers that are not DeepSpeed's.
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}


def train(folder: str, resume: str | None = None) -> nn.Module:
    args = TrainingArguments(
        folder, deepspeed=DEEPSPEED, learning_rate=3e-3, weight_decay=0.1, max_steps=6, save_steps=3, **SMALL
    )
    trainer = Trainer(
        model=LlamaForCausalLM(LlamaConfig(**TINY)),
        args=args,
        train_dataset=Tokens(),
        optimizer_cls_and_kwargs=(MuonFactory(args, adjust_lr_fn="match_rms_adamw", audit_every=2), {}),
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer.model


# [end:recipe]


TINY = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SMALL = {"per_device_train_batch_size": 4, "report_to": [], "logging_steps": 1}


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Random tokens from a small part of the vocabulary, so that the model has something to learn."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 16, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="out/hf_deepspeed")
    parser.add_argument("--resume")
    given = parser.parse_args()
    torch.manual_seed(0)
    train(given.folder, given.resume)
