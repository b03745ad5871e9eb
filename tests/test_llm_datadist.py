"""The name shim in a process that asks for it."""
from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

import pytest
import scripts

from shmkv import llm_datadist, npu_stand_in

# Names that programs were seen to import: samples and tests of hixl and CANN, vllm-ascend, omni-infer, sglang, torchair's guide.
VALUES = ("BlocksCacheKey Cache CacheDesc CacheKey CacheKeyByIdAndIndex CacheTask DataType KvCache LayerSynchronizer MemInfo "
          "Memtype Placement RegisterMemStatus TransferConfig TransferWithCacheKeyConfig")
CHECKS = "check_int32 check_int64 check_list_int32 check_uint16 check_uint32 check_uint64 check_uint8"
SEEN = {
    "llm_datadist": f"{VALUES} LLMClusterInfo LLMConfig LLMDataDist LLMException LLMRole LLMStatusCode LlmConfig Status Tensor "
                    "TensorDesc KvCacheManager",
    "llm_datadist.configs": "LLMClusterInfo LLMRole LlmConfig",
    "llm_datadist.data_type": "DataType dtype_to_np_dtype np_dtype_to_dtype valid_np_dtypes",
    "llm_datadist.status": "LLMException LLMStatusCode Status",
    "llm_datadist.utils.utils": CHECKS,
    "llm_datadist.v2.cache_manager": "CacheManager",
    "llm_datadist.v2.llm_datadist": "LLMDataDist _shutdown_handler",
    "llm_datadist.v2.llm_types": VALUES,
    "llm_datadist.v2.llm_utils": "layer_range_to_tensor_indices parse_listen_ip_info",
    "llm_datadist_v1": f"{VALUES} LLMClusterInfo LLMConfig LLMDataDist LLMException LLMRole LLMStatusCode LlmConfig Status Tensor "
                       "TensorDesc KvCacheManager",
    "llm_datadist_v1.configs": "LLMClusterInfo LLMRole LlmConfig",
    "llm_datadist_v1.data_type": "DataType",
    "llm_datadist_v1.kv_cache_manager": "KvCacheManager",
    "llm_datadist_v1.llm_datadist": "LLMDataDist _shutdown_handler",
    "llm_datadist_v1.llm_types": VALUES,
    "llm_datadist_v1.llm_utils": "layer_range_to_tensor_indices parse_listen_ip_info",
    "llm_datadist_v1.status": "LLMException LLMStatusCode Status",
    "llm_datadist_v1.tensor": "Tensor TensorDesc",
    "llm_datadist_v1.utils.utils": CHECKS,
}
INSTALLED = "import shmkv\nshmkv.install_as_llm_datadist()\n"
EACH_MODULE = """
import json, sys
from importlib import import_module
import shmkv
shmkv.install_as_llm_datadist(stub_npu=True)
found, whose = {}, {}
for name in sys.argv[1:]:
    scope = {}
    exec(f"from {name} import *", scope)
    module = import_module(name)
    for word in module.__all__:
        value = whose.setdefault(word, getattr(module, word))
        assert value is scope[word] is getattr(module, word), (name, word)
    try:
        module.nothing_of_that_name
    except AttributeError as error:
        found[name] = str(error)
json.dump(found, sys.stdout)
"""


@pytest.mark.parametrize("module", SEEN)
def test_imports_that_programs_were_seen_with(module: str) -> None:
    names = SEEN[module].split()
    assert scripts.run(f"{INSTALLED}from {module} import {', '.join(names)}\nprint('ok')") == "ok\n"
    assert set(names) <= set(llm_datadist.MODULES[module])


def test_importing_shmkv_does_not_make_the_names() -> None:
    code = "import sys, shmkv.llm_datadist\nprint([f for f in sys.meta_path if type(f).__module__.startswith('shmkv')])"
    assert scripts.run(code) == "[]\n"


def test_twice_is_once() -> None:
    assert scripts.run(f"{INSTALLED}{INSTALLED}import sys, llm_datadist\n"
                       "print(sum(type(f).__name__ == 'ShimFinder' for f in sys.meta_path))") == "1\n"


def test_submodules_come_with_the_package_and_reload_works() -> None:
    code = (f"{INSTALLED}import importlib, llm_datadist\nprint(llm_datadist.v2.llm_types.CacheKey is llm_datadist.CacheKey)\n"
            "print(importlib.reload(llm_datadist) is llm_datadist, importlib.util.find_spec('llm_datadist.v2').origin)")
    assert scripts.run(code) == f"True\nTrue {llm_datadist.__file__}\n"


def test_one_that_was_imported_before_is_refused_and_left(tmp_path: Path) -> None:
    (tmp_path / "llm_datadist.py").write_text("NAME = 'the real one'\n")
    code = (f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nimport llm_datadist, shmkv\n"
            "try:\n    shmkv.install_as_llm_datadist()\nexcept shmkv.LLMException as error:\n    print(error)\n"
            "import llm_datadist\nprint(llm_datadist.NAME)")
    first, last = scripts.run(code).splitlines()
    assert first.startswith(f"llm_datadist was imported before, from {tmp_path}/llm_datadist.py: call install_as_llm_datadist")
    assert last == "the real one"


def test_children_by_spawn_have_the_names_when_the_main_module_asks_at_its_top(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(INSTALLED + """
import multiprocessing
from llm_datadist import CacheKey

def child(key):
    assert key == CacheKey(1, 2)

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=child, args=(CacheKey(1, 2),))
    process.start()
    process.join(30)
    print(process.exitcode)
""")
    assert scripts.run("import runpy, sys\nsys.argv[:] = sys.argv[1:]\nrunpy.run_path(sys.argv[0], run_name='__main__')", program) \
        == "0\n"


def test_each_module_has_what_it_says_and_refuses_the_rest() -> None:
    modules = sorted({*llm_datadist.MODULES, *npu_stand_in.MODULES})
    refused = json.loads(scripts.run(EACH_MODULE, *modules))
    assert refused == {name: f"module '{name}' has no attribute 'nothing_of_that_name'; what of llm_datadist is offered: "
                             "docs/llm_datadist.md of shmkv" for name in modules}


def test_torch_is_not_imported_and_the_names_not_made_without_being_asked_for() -> None:
    for module in (llm_datadist, npu_stand_in):
        tree = ast.parse(Path(module.__file__).read_text())
        assert not [node for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names if "torch" in name.name]
    assert "llm_datadist" not in sys.modules


@pytest.mark.parametrize(("device", "number"), [(0, 0), (5, 5), ("npu", 0), ("npu:7", 7)])
def test_set_device_remembers(device: object, number: int) -> None:
    npu_stand_in.set_device(device)
    assert npu_stand_in.current_device() == number


@pytest.mark.parametrize(("device", "error"), [
    (-1, ValueError), ("cuda:0", ValueError), ("npu:x", ValueError), (None, TypeError), (1.0, TypeError)])
def test_set_device_refuses_what_is_none(device: object, error: type[Exception]) -> None:
    npu_stand_in.set_device(4)
    with pytest.raises(error, match="device"):
        npu_stand_in.set_device(device)
    assert npu_stand_in.current_device() == 4


@pytest.mark.parametrize("dtype", [None, "float16", 3])
def test_tensors_need_an_element_type_of_torch(dtype: object) -> None:
    with pytest.raises(TypeError, match=r"dtype.*torch\.dtype"):
        npu_stand_in.create_npu_tensors([1], dtype, [64])
