"""`python -m kdtree_nb` is `kdtree-nb`, where launchers such as torchrun want a module."""

import sys

from kdtree_nb.cli import main

if __name__ == "__main__":
    sys.exit(main())
