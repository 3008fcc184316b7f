"""Native kernels: compiled on first use, loaded once per process, called through `kdtree_nb.native.ops`."""

from kdtree_nb.native.build import Build, load, require

__all__ = ["Build", "load", "require"]
