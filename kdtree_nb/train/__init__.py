"""How the models in `data/` are made: corpus, plain PyTorch models, optimisers, and training runs of a target and of a
drafter for it. `kdtree-nb train-nano` makes runs of them; a chapter may make a short one itself."""

from kdtree_nb.train.drafter.recipe import PRESETS as DRAFTER_PRESETS
from kdtree_nb.train.drafter.target import engine_target, plain_target
from kdtree_nb.train.drafter.trainer import Texts, sample_blocks
from kdtree_nb.train.drafter.trainer import Trainer as DrafterTrainer
from kdtree_nb.train.muon import Muon, orthogonalise
from kdtree_nb.train.nano.decode import greedy_batch
from kdtree_nb.train.nano.export import export_model, load_plain, round_weights
from kdtree_nb.train.nano.manifest import read_manifest
from kdtree_nb.train.nano.recipe import NANO_CONFIG
from kdtree_nb.train.nano.recipe import PRESETS as TARGET_PRESETS
from kdtree_nb.train.nano.tokenizer import MASK, TOKENIZER_PATH
from kdtree_nb.train.nano.tokens import standard_library_corpus
from kdtree_nb.train.nano.trainer import Trainer as TargetTrainer
from kdtree_nb.train.plain_model import PlainModel
from kdtree_nb.train.streams import sample_windows

__all__ = [
    "DRAFTER_PRESETS",
    "DrafterTrainer",
    "Muon",
    "MASK",
    "NANO_CONFIG",
    "PlainModel",
    "TARGET_PRESETS",
    "TOKENIZER_PATH",
    "TargetTrainer",
    "Texts",
    "engine_target",
    "export_model",
    "greedy_batch",
    "load_plain",
    "orthogonalise",
    "plain_target",
    "read_manifest",
    "round_weights",
    "sample_blocks",
    "sample_windows",
    "standard_library_corpus",
]
