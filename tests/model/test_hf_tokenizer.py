"""Tokenizers of checkpoint folders: ids and text there and back, streams without broken characters, chat templates."""

from __future__ import annotations

import base64
import json
import random

import pytest
import tiktoken
import tokenizers

from kdtree_nb.errors import CheckpointError
from kdtree_nb.model.hf_tokenizer import KIMI_PATTERN, find_tokenizer

TEXTS = [
    "def add(a, b):\n    return a + b\n",
    "naïve café — 12345 6",
    "汉字 and кириллица",
    "🙂👩‍👩‍👧",
    "  \n\n\t",
    "I'll",
]
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|a|>{% endif %}"
)


@pytest.fixture
def json_folder(tmp_path):
    """A byte-level BPE tokenizer.json trained on the texts, with a chat template."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|user|>", "<|a|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path


@pytest.fixture
def kimi_folder(tmp_path):
    """Ranks of all bytes and a few pairs, with a named special token."""
    tokens = [bytes([b]) for b in range(256)] + [b"de", b"def", b" a", "汉".encode()[:2], "汉".encode()]
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens)]
    (tmp_path / "tiktoken.model").write_text("\n".join(lines) + "\n")
    special = {str(len(tokens) + 2): {"content": "<|im_end|>"}}
    settings = {"added_tokens_decoder": special, "chat_template": TEMPLATE}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


@pytest.fixture(params=["json_folder", "kimi_folder"])
def folder(request):
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("text", TEXTS)
def test_there_and_back(folder, text):
    tokenizer = find_tokenizer(folder)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("text", TEXTS)
def test_a_stream_gives_whole_characters(folder, text):
    tokenizer = find_tokenizer(folder)
    stream = tokenizer.stream()
    pieces = [stream.push(token) for token in tokenizer.encode(text)]
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)
    assert "".join(pieces) + stream.finish() == text


def test_a_character_cut_short_is_marked(folder):
    tokenizer = find_tokenizer(folder)
    stream = tokenizer.stream()
    ids = tokenizer.encode("x🙂")
    text = "".join([stream.push(token) for token in ids[:-1]]) + stream.finish()
    assert stream.finish() == ""
    assert text == "x\N{REPLACEMENT CHARACTER}"


def test_kimi_ids_are_those_of_tiktoken(kimi_folder):
    tokenizer = find_tokenizer(kimi_folder)
    ranks = {}
    for line in (kimi_folder / "tiktoken.model").read_text().splitlines():
        token, rank = line.split()
        ranks[base64.b64decode(token)] = int(rank)
    plain = tiktoken.Encoding("plain", pat_str=KIMI_PATTERN, mergeable_ranks=ranks, special_tokens={})
    for text in TEXTS:
        assert tokenizer.encode(text) == plain.encode(text)
    assert tokenizer.encode("def") == [257]
    assert tokenizer.encode("<|im_end|>") == [263]
    assert tokenizer.encode("<|reserved_token_261|>") == [261]
    assert tokenizer.decode([263, 10**6, 65]) == "<|im_end|>\N{REPLACEMENT CHARACTER}A"


def test_how_kimi_cuts_text():
    plain = tiktoken.Encoding("cut", pat_str=KIMI_PATTERN, mergeable_ranks={bytes([b]): b for b in range(256)},
                              special_tokens={})  # fmt: skip
    import regex

    found = [m.group() for m in regex.finditer(KIMI_PATTERN, "It's 12345汉字ABC don't!!\n\n x", regex.V1)]
    assert found == ["It's", " ", "123", "45", "汉字", "ABC", " don't", "!!\n\n", " x"]
    assert plain.decode(plain.encode("It's 12345汉字")) == "It's 12345汉字"


def test_chat_templates(folder):
    tokenizer = find_tokenizer(folder)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert tokenizer.decode(ids) == "<|user|>hi<|a|>"


def test_without_a_template(json_folder):
    (json_folder / "chat_template.jinja").unlink()
    with pytest.raises(CheckpointError, match="chat template"):
        find_tokenizer(json_folder).apply_chat_template([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("template", ["{% for", "{{ raise_exception('no') }}", "{{ x.y.z }}", "{{ 1 / 0 }}"])
def test_a_template_that_fails(folder, template):
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(CheckpointError, match="chat template that renders these messages"):
        find_tokenizer(folder).apply_chat_template([{"role": "user", "content": "hi"}])


def test_templates_by_name(json_folder):
    (json_folder / "chat_template.jinja").unlink()
    templates = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": TEMPLATE}]
    (json_folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    tokenizer = find_tokenizer(json_folder)
    assert tokenizer.decode(tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])) == "<|user|>hi<|a|>"


def test_a_template_that_is_no_text(json_folder):
    (json_folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja.*UTF-8"):
        find_tokenizer(json_folder)


@pytest.mark.parametrize("added", [[1], {"261": {}}, {"261": 5}, {"261": ""}, {"261": "a", "262": "a"}])
def test_special_tokens_that_have_no_name_or_one_name(kimi_folder, added):
    (kimi_folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    with pytest.raises(CheckpointError, match="added_tokens_decoder"):
        find_tokenizer(kimi_folder)


def test_a_stream_ends_like_the_whole_text(folder):
    tokenizer = find_tokenizer(folder)
    draw = random.Random(0)
    for _ in range(100):
        ids = [draw.randrange(600) for _ in range(draw.randint(1, 12))]
        stream = tokenizer.stream()
        assert "".join([stream.push(i) for i in ids]) + stream.finish() == tokenizer.decode(ids)


def test_lone_surrogates_are_the_callers_error(folder):
    with pytest.raises(UnicodeEncodeError):
        find_tokenizer(folder).encode("\ud800")
