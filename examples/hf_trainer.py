"""transformers' Trainer with Muon on a tiny random Llama.

One process:  python examples/hf_trainer.py
Two ranks:    torchrun --nproc-per-node 2 examples/hf_trainer.py

`--resume out/hf_trainer/checkpoint-3` resumes from this checkpoint. `--fsdp` needs GPUs: on CPUs accelerate ignores it.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

if not torch.accelerator.is_available():
    os.environ["ACCELERATE_USE_CPU"] = "true"  # without this, accelerate does not initialize torch.distributed on CPUs

# [start:recipe]
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from shardmuon.frameworks.transformers import MuonFactory


def train(folder: str, resume: str | None = None, **options: Any) -> nn.Module:
    model = LlamaForCausalLM(LlamaConfig(**TINY))
    args = TrainingArguments(
        folder, learning_rate=3e-3, weight_decay=0.1, max_steps=6, save_steps=3, **SMALL, **options
    )
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
FSDP2 = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "state_dict_type": "SHARDED_STATE_DICT"}


def options(fsdp: bool) -> dict[str, Any]:
    """Additional TrainingArguments: FSDP2 settings if `fsdp` is True, otherwise none."""
    return {"fsdp": "full_shard auto_wrap", "fsdp_config": FSDP2} if fsdp else {}


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Random tokens from a small part of the vocabulary, so that the model has something to learn."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 16, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="out/hf_trainer")
    parser.add_argument("--resume")
    parser.add_argument("--fsdp", action="store_true")
    given = parser.parse_args()
    train(given.folder, given.resume, **options(given.fsdp))
