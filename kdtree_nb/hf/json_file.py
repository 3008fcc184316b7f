"""JSON files of checkpoint folders, which are other people's: each error names the file and what is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kdtree_nb.errors import CheckpointError


def read_object(path: Path, operation: str) -> dict[str, Any]:
    """The object in a JSON file, UTF-8 with or without a byte order mark.

    Raises CheckpointError on a file that cannot be read or is none (a pipe would block), on text that is no JSON, on a
    value that is no object, and on a key given twice, of which readers take different ones.
    """
    where = f"{operation}: {path}"

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) != len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise CheckpointError(f"{where}: expected each key once, got {twice!r} twice")
        return fields

    try:
        if path.exists() and not path.is_file():
            raise CheckpointError(f"{where}: expected a regular file, got another kind; put the file's own copy there")
        fields = json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=unique)
    except OSError as error:
        raise CheckpointError(f"{where}: expected a readable file, got {error.strerror or error}") from error
    except RecursionError as error:
        raise CheckpointError(f"{where}: expected JSON, got more nesting than can be read") from error
    except ValueError as error:
        raise CheckpointError(f"{where}: expected JSON, got {error}") from error
    if not isinstance(fields, dict):
        raise CheckpointError(f"{where}: expected an object, got {type(fields).__name__}")
    return fields
