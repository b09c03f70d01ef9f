"""TRL's SFTTrainer with Muon on a tiny random Llama.

One process:  python examples/trl_sft.py
Two ranks:    torchrun --nproc-per-node 2 examples/trl_sft.py
"""

from __future__ import annotations

import argparse
import os

import torch
from torch import nn

if not torch.accelerator.is_available():
    os.environ["ACCELERATE_USE_CPU"] = "true"  # without this, accelerate does not initialize torch.distributed on CPUs

# [start:recipe]
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from shardmuon.frameworks.transformers import MuonFactory


def train(folder: str, resume: str | None = None) -> nn.Module:
    tokenizer = tiny_tokenizer()
    model = LlamaForCausalLM(LlamaConfig(**TINY))
    args = SFTConfig(folder, learning_rate=3e-3, weight_decay=0.1, max_steps=6, save_steps=3, max_length=16, **SMALL)
    trainer = SFTTrainer(
        model=model,
        args=args,
        train_dataset=Dataset.from_list([{"prompt": "one two", "completion": f" three {w}"} for w in WORDS] * 8),
        processing_class=tokenizer,
        optimizer_cls_and_kwargs=(MuonFactory(args, adjust_lr_fn="match_rms_adamw"), {}),
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer.model


# [end:recipe]


WORDS = ["four", "five", "six", "seven", "eight", "nine", "ten", "eleven"]
TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SMALL = {"per_device_train_batch_size": 4, "report_to": [], "bf16": False, "gradient_checkpointing": False}


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Make a word-level tokenizer, so that no tokenizer has to be downloaded."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "<eos>", "<unk>", "one", "two", "three", *WORDS]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="out/trl_sft")
    parser.add_argument("--resume")
    given = parser.parse_args()
    torch.manual_seed(0)
    train(given.folder, given.resume)
