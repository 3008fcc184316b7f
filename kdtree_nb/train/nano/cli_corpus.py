"""Steps manifest, tokenizer and pack of `kdtree-nb train-nano`: the pinned corpus and its tokens."""

from __future__ import annotations

import argparse
from pathlib import Path

from kdtree_nb.kdtr import expect_writable
from kdtree_nb.train.nano.manifest import make_manifest, pinned_documents, read_manifest, write_manifest
from kdtree_nb.train.nano.tokenizer import TOKENIZER_PATH, VOCAB_SIZE, fingerprint, save_tokenizer, train_bpe
from kdtree_nb.train.nano.tokens import pinned_corpus, save_tokens

MANIFEST_PATH = TOKENIZER_PATH.with_name("corpus.json")


def main(step: str, argv: list[str], prog: str) -> None:
    """Do one of the steps."""
    {"manifest": _manifest, "tokenizer": _tokenizer, "pack": _pack}[step](argv, prog)


def _manifest(argv: list[str], prog: str) -> None:
    parser = argparse.ArgumentParser(prog=prog, description="Write the manifest of this environment's packages.")
    parser.add_argument("--out", type=Path, default=MANIFEST_PATH, help="JSON file to write (default: %(default)s)")
    args = parser.parse_args(argv)
    manifest = make_manifest()
    write_manifest(args.out, manifest)
    print(f"{args.out}: {len(manifest.packages)} packages, bytes {manifest.totals()}")


def _tokenizer(argv: list[str], prog: str) -> None:
    parser = argparse.ArgumentParser(prog=prog, description="Train the tokenizer on the pinned corpus.")
    _add_manifest(parser)
    parser.add_argument("--out", type=Path, default=TOKENIZER_PATH, help="JSON file to write (default: %(default)s)")
    parser.add_argument("--vocab", type=int, default=VOCAB_SIZE, help="entries (default: %(default)s)")
    args = parser.parse_args(argv)
    expect_writable(args.out.parent)
    manifest = read_manifest(args.manifest)
    documents = [d for kind in ("code", "prose") for d in pinned_documents(manifest, kind, "train")]
    save_tokenizer(args.out, train_bpe(documents, args.vocab))
    print(f"{args.out}: {args.vocab} entries, SHA-256 {fingerprint(args.out)}")


def _pack(argv: list[str], prog: str) -> None:
    parser = argparse.ArgumentParser(prog=prog, description="Encode the pinned corpus into one file.")
    _add_manifest(parser)
    parser.add_argument("--tokenizer", type=Path, default=TOKENIZER_PATH, help="default: %(default)s")
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    parser.add_argument("--plain", action="store_true", help="uncompressed: larger, and read at once")
    args = parser.parse_args(argv)
    expect_writable(args.out.parent)
    corpus = pinned_corpus(read_manifest(args.manifest), args.tokenizer)
    save_tokens(args.out, corpus, packed=not args.plain)
    counts = {name: record["num_tokens"] for name, record in corpus.record["streams"].items()}
    print(f"{args.out}: tokens {counts}, {args.out.stat().st_size / 2**20:.1f} MiB")


def _add_manifest(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--manifest", type=Path, default=MANIFEST_PATH, help="default: %(default)s")
