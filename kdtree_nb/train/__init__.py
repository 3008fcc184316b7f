"""How the models in `data/` are made: corpus, plain PyTorch models, optimisers and training commands."""
