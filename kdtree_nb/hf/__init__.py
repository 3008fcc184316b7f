"""Checkpoint folders of the hub: config.json, safetensors, tokenizer files. Nothing here makes a model."""

from kdtree_nb.hf.config import HfConfig, read_config
from kdtree_nb.hf.folder import CheckpointFolder
from kdtree_nb.hf.quantization import Fp8Blocks, Int4Groups

__all__ = ["CheckpointFolder", "Fp8Blocks", "HfConfig", "Int4Groups", "read_config"]
