"""LoRA with peft, transformers' Trainer and Muon on a tiny random Llama.

One process:  python examples/peft_lora.py
Two ranks:    torchrun --nproc-per-node 2 examples/peft_lora.py
"""

from __future__ import annotations

import argparse
import os

import torch
from torch import nn
from torch.utils.data import Dataset

if not torch.accelerator.is_available():
    os.environ["ACCELERATE_USE_CPU"] = "true"  # without this, accelerate does not initialize torch.distributed on CPUs

# [start:recipe]
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from shardmuon.frameworks.transformers import MuonFactory


def train(folder: str, resume: str | None = None) -> nn.Module:
    base = LlamaForCausalLM(LlamaConfig(**TINY))
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", lora_dropout=0.0))
    args = TrainingArguments(folder, learning_rate=3e-3, weight_decay=0.0, max_steps=6, save_steps=3, **SMALL)
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=Tokens(),
        optimizer_cls_and_kwargs=(MuonFactory(args, adjust_lr_fn="match_rms_adamw"), {}),
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
    parser.add_argument("--folder", default="out/peft_lora")
    parser.add_argument("--resume")
    given = parser.parse_args()
    torch.manual_seed(0)
    train(given.folder, given.resume)
