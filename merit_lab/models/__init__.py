"""The models of the lab."""

from merit_lab.models.gpt2 import GPT2, SIZES, GPT2Config, fuse_qkv, load_transformers_weights, split_qkv

__all__ = ["GPT2", "SIZES", "GPT2Config", "fuse_qkv", "load_transformers_weights", "split_qkv"]
