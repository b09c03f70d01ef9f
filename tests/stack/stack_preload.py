"""Modules that the fork server imports once, so that ranks forked from the server do not have to import them again."""

import contextlib
import os
import warnings

os.environ.update(DS_ACCELERATOR="cpu", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", CUDA_VISIBLE_DEVICES="")

import torch

torch.set_num_threads(1)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.tensor

    for name in ("transformers", "accelerate", "peft", "trl", "lightning", "timm", "torchtitan"):
        with contextlib.suppress(ImportError):
            __import__(name)
    with contextlib.suppress(ImportError):
        from transformers import LlamaForCausalLM, Trainer, TrainingArguments  # noqa: F401
    with contextlib.suppress(ImportError):
        from trl import SFTConfig, SFTTrainer  # noqa: F401
import shardmuon  # noqa: E402, F401
