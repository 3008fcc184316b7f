"""The target model: an MLA + MoE decoder over the native operations."""

from kdtree_nb.model.checkpoint import build_model, load_model
from kdtree_nb.model.latent_cache import LatentCache
from kdtree_nb.model.tokenizer import ByteTokenizer, StreamDecoder
from kdtree_nb.model.transformer import Model

__all__ = ["ByteTokenizer", "LatentCache", "Model", "StreamDecoder", "build_model", "load_model"]
