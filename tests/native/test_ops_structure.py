"""Every operation of the schema is complete: CPU kernel, fake kernel, face, oracle, argument struct and tests."""

from __future__ import annotations

import inspect
import re
import threading
import time
from pathlib import Path

import pytest
import torch
from torch._library.simple_registry import singleton as fake_registry

from kdtree_nb import ops, reference
from kdtree_nb.native import build
from kdtree_nb.native.ops.namespace import Namespace, native

ROOT = Path(__file__).parents[2]
OP_ARGS = (ROOT / "kernels" / "op_args.h").read_text()
NAMES = sorted(re.findall(r'm\.def\("(\w+)\(', (ROOT / "kernels" / "bind" / "schema.cpp").read_text()))

# One kernel may serve two operators (a whole and its share are one). A change of layout has no oracle but its inverse,
# and the words of a share are judged by what merging them gives.
KERNEL_OF = {"linear_heads": "linear", "tree_rows_padded": "tree_rows", "draft_topk_share": "draft_topk"}
WITHOUT_ORACLE = {"pack_linear", "draft_topk_share"}


def camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


def test_schema_is_what_was_loaded():
    prefix = f"{native.load()}::"
    loaded = sorted(n.removeprefix(prefix) for n in torch._C._dispatch_get_all_op_names() if n.startswith(prefix))
    assert loaded == NAMES and len(NAMES) >= 18


def test_no_implementation_lacks_a_schema():
    namespace = native.load()
    dangling = [text for text in torch._C._dispatch_find_dangling_impls() if namespace in text]
    assert dangling == []


@pytest.mark.parametrize("name", NAMES)
def test_has_a_cpu_kernel(name):
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"{native.load()}::{name}", "CPU")
    kernel = KERNEL_OF.get(name, name)
    assert f"int {kernel}_cpu(const {camel(kernel)}Args&);" in OP_ARGS
    assert re.search(rf"^struct {camel(kernel)}Args \{{", OP_ARGS, re.MULTILINE)
    sources = [path for path in (ROOT / "kernels").glob("*.cpp") if f"int {kernel}_cpu(" in path.read_text()]
    assert len(sources) == 1


@pytest.mark.parametrize("name", NAMES)
def test_has_a_cuda_kernel(name):
    kernel = KERNEL_OF.get(name, name)
    assert f"int {kernel}_cuda(const {camel(kernel)}Args&, void* stream);" in OP_ARGS
    sources = [path for path in (ROOT / "kernels").glob("*.cu") if f"int {kernel}_cuda(" in path.read_text()]
    bindings = (ROOT / "kernels" / "bind" / "ops.h").read_text()
    assert len(sources) == 1 and f'm.impl("{name}", &{name}<Device>);' in bindings
    if not build.load().no_cuda:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"{native.load()}::{name}", "CUDA")


@pytest.mark.parametrize("name", NAMES)
def test_has_a_fake_kernel(name):
    assert fake_registry.find(f"{native.load()}::{name}").fake_impl.kernel is not None


@pytest.mark.parametrize("name", NAMES)
def test_has_a_documented_face(name):
    face = getattr(ops, name)
    assert name in ops.__all__ and callable(face) and inspect.getdoc(face)
    annotations = inspect.signature(face)
    assert annotations.return_annotation is not inspect.Signature.empty
    assert all(p.annotation is not inspect.Parameter.empty for p in annotations.parameters.values())


@pytest.mark.parametrize("name", NAMES)
def test_has_an_oracle(name):
    assert name in WITHOUT_ORACLE or callable(getattr(reference, name))
    assert not (name in WITHOUT_ORACLE and hasattr(reference, name))


@pytest.mark.parametrize("name", NAMES)
def test_is_opchecked_and_called(name):
    texts = [path.read_text() for path in Path(__file__).parent.glob("test_*.py") if path != Path(__file__)]
    assert any(re.search(rf'opcheck\(\s*"{name}"', text) for text in texts)
    assert any(f"ops.{name}(" in text for text in texts)


def test_unknown_operator_is_an_attribute_error():
    with pytest.raises(AttributeError):
        native.no_such_operator  # noqa: B018


def test_fakes_are_registered_once_from_any_thread(monkeypatch):
    registered = []

    def register(name, function):
        time.sleep(0.01)
        registered.append((name, function))

    monkeypatch.setattr(torch.library, "register_fake", register)
    space = Namespace()
    early = space.fake(lambda: None)
    threads = [threading.Thread(target=space.load) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    late = space.fake(lambda: None)  # a module imported after the kernels were loaded
    assert [function for _, function in registered] == [early, late]


def test_kernels_do_not_see_torch():
    files = [path for path in (ROOT / "kernels").iterdir() if path.suffix in (".h", ".cpp", ".cu", ".cuh")]
    assert len(files) > 15
    seeing = [path.name for path in files if re.search(r"#include\s*[<\"](torch|ATen|c10)/", path.read_text())]
    assert seeing == []
