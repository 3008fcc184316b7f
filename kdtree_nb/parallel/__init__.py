"""Tensor parallel: one model on 1, 2, 4 or 8 ranks, with the bits of one rank.

    ranks = parallel.start("cuda")          # in each process that torchrun has started
    with ranks:
        model = load_model(path, ranks.device, torch.bfloat16, ranks=ranks)
        Engine(model).generate_ar(prompt, 64)

Every rank runs the same calls. `parallel.run` starts processes on this machine and calls a function on each.
"""

from kdtree_nb.model.share import Share
from kdtree_nb.parallel import programs
from kdtree_nb.parallel.local import run
from kdtree_nb.parallel.tensor_parallel import TensorParallel, start
from kdtree_nb.parallel.watch import Patience

__all__ = ["Patience", "Share", "TensorParallel", "programs", "run", "start"]
