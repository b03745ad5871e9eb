"""`shmkv run`: the program cannot tell it from plain python, but for llm_datadist."""
from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from peer import Namespace

pytestmark = pytest.mark.timeout(300)     # many programs, one after the other
WATCHDOG_S = 60
PLAIN = [sys.executable]
AS_MODULE = [sys.executable, "-m", "shmkv", "run"]
COMMAND = [str(Path(sys.executable).with_name("shmkv")), "run"]

# What a program can see of how it was started.
LOOKS_AROUND = """
import json, os, sys
if __name__ == "__main__":
    json.dump([sys.argv, sys.path, __name__, __file__, getattr(__spec__, "name", None), __package__, sorted(globals()),
               sys.flags, sys.warnoptions, sorted(sys._xoptions), os.path.realpath(sys.executable),
               sys.stdin.read(), "shmkv" in sys.modules, "numpy" in sys.modules], sys.stdout)
"""
A_REAL_ONE = """
from pathlib import Path
Path(__file__).with_name("was imported").touch()
NAME = "the real one"
"""


def start(how: list[str], *arguments: object, cwd: Path, env: dict[str, str] | None = None,
          stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([*how, *map(str, arguments)], cwd=cwd, capture_output=True, text=True, input=stdin, timeout=WATCHDOG_S,
                          env={**os.environ, **(env or {})})


@pytest.fixture
def script(tmp_path: Path) -> Any:
    """script(text, name): a program in a folder of this test."""

    def write(text: str, name: str = "program.py") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


@pytest.fixture
def real_one(tmp_path: Path) -> Path:
    """A folder with an llm_datadist that is not ours and tells when it was imported."""
    package = tmp_path / "installed" / "llm_datadist"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(A_REAL_ONE)
    return package


# -- as plain python ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("how", [AS_MODULE, COMMAND], ids=["module", "command"])
@pytest.mark.parametrize("arguments", [[], ["-x", "--help", "a b", "--", "-m", "", "--stub-npu"]], ids=["none", "many"])
def test_a_program_sees_what_plain_python_shows_it(script: Any, tmp_path: Path, how: list[str], arguments: list[str]) -> None:
    script(LOOKS_AROUND)
    plain = start(PLAIN, "program.py", *arguments, cwd=tmp_path, stdin="lines\n")
    ours = start(how, "program.py", *arguments, cwd=tmp_path, stdin="lines\n")
    assert (ours.returncode, ours.stderr) == (0, "")
    assert json.loads(ours.stdout) == json.loads(plain.stdout)
    assert json.loads(ours.stdout)[0] == ["program.py", *arguments]


@pytest.mark.parametrize("options", [["-u"], ["-O"], ["-X", "dev"], ["-W", "error", "-B"], ["-X", "utf8", "-bb"]], ids=" ".join)
def test_options_of_the_interpreter_are_kept(script: Any, tmp_path: Path, options: list[str]) -> None:
    path = script(LOOKS_AROUND)
    plain = start([sys.executable, *options], path, "a", cwd=tmp_path)
    for how in ([sys.executable, *options, "-m", "shmkv", "run"], [sys.executable, *options, *COMMAND]):
        assert json.loads(start(how, path, "a", cwd=tmp_path).stdout) == json.loads(plain.stdout)


def test_options_that_end_in_m_are_taken_apart(script: Any, tmp_path: Path) -> None:
    path = script(LOOKS_AROUND)
    for how in ([sys.executable, "-Bm", "shmkv", "run"], [sys.executable, "-B", "-mshmkv", "run"]):
        assert json.loads(start(how, path, cwd=tmp_path).stdout) == json.loads(start([*PLAIN, "-B"], path, cwd=tmp_path).stdout)


def test_links_are_resolved_as_python_does(script: Any, tmp_path: Path) -> None:
    script(LOOKS_AROUND)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "link.py").symlink_to(tmp_path / "program.py")
    plain, ours = (start(how, "elsewhere/link.py", cwd=tmp_path) for how in (PLAIN, AS_MODULE))
    assert json.loads(ours.stdout) == json.loads(plain.stdout)
    assert json.loads(ours.stdout)[1][0] == str(tmp_path)


def test_a_module_runs_as_by_python_m(script: Any, tmp_path: Path) -> None:
    script(LOOKS_AROUND, "tool.py")
    plain = start([*PLAIN, "-m"], "tool", "-m", "x", cwd=tmp_path)
    ours = start([*AS_MODULE, "-m"], "tool", "-m", "x", cwd=tmp_path)
    assert json.loads(ours.stdout) == json.loads(plain.stdout)


@pytest.mark.parametrize(("text", "status"), [
    ("", 0), ("raise SystemExit(3)", 3), ("import sys\nsys.exit('told')", 1), ("import os\nos._exit(7)", 7),
    ("def inner():\n    return 1 / 0\n\ninner()", 1), ("raise RuntimeError('a') from ValueError('b')", 1), ("x = (", 1),
    ("import nothing_of_that_name", 1), ("raise KeyboardInterrupt", -signal.SIGINT),
    ("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
    ("import atexit\natexit.register(print, 'at exit')\nraise SystemExit(2)", 2),
    ("import warnings\nwarnings.warn('careful')", 0),
], ids=["end", "status", "text", "at once", "raises", "chained", "syntax", "import", "interrupt", "signal", "atexit", "warning"])
def test_status_output_and_traceback_are_those_of_plain_python(script: Any, tmp_path: Path, text: str, status: int) -> None:
    script(text)
    plain, ours = (start(how, "program.py", cwd=tmp_path) for how in (PLAIN, AS_MODULE))
    assert (ours.returncode, ours.stdout, ours.stderr) == (plain.returncode, plain.stdout, plain.stderr)
    assert ours.returncode == status


@pytest.mark.parametrize("name", ["nothing.py", "folder", "no/such/place.py"])
def test_a_script_that_is_not_there(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    plain, ours = (start(how, name, cwd=tmp_path) for how in (PLAIN, AS_MODULE))
    assert (ours.returncode, ours.stderr) == (plain.returncode, plain.stderr)
    assert ours.returncode != 0
    assert name in ours.stderr


def test_no_script_is_told(tmp_path: Path) -> None:
    done = start(AS_MODULE, cwd=tmp_path)
    assert done.returncode == 2
    assert "SCRIPT" in done.stderr


@pytest.mark.parametrize("option", ["-E", "-I", "-S"])
def test_a_python_that_would_not_listen_is_refused(script: Any, tmp_path: Path, option: str) -> None:
    path = script("print('ran')")
    # By path and not by name: without site-packages or the current folder there may be no shmkv.
    program = f"import sys\nsys.path[:0] = {sys.path!r}\nfrom shmkv.cli import main\nsys.argv[1:] = ['run', {str(path)!r}]\nmain()"
    done = start([sys.executable, option, "-c", program], cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert "PYTHONPATH and sitecustomize" in done.stderr


# -- what the names lead to --------------------------------------------------------------------------------------------

SAYS_WHOSE = """
import json, llm_datadist, llm_datadist_v1
from llm_datadist import LLMDataDist
print(json.dumps([LLMDataDist.__module__, getattr(llm_datadist, "NAME", None), llm_datadist_v1.LLMDataDist is LLMDataDist]))
"""


def test_without_it_the_names_are_not_there(script: Any, tmp_path: Path) -> None:
    path = script("import shmkv\nimport llm_datadist")
    done = start(PLAIN, path, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.endswith("ModuleNotFoundError: No module named 'llm_datadist'\n")


def test_an_installed_one_is_neither_imported_nor_changed(script: Any, tmp_path: Path, real_one: Path) -> None:
    path = script(SAYS_WHOSE)
    environment = {"PYTHONPATH": str(real_one.parent)}
    done = start(AS_MODULE, path, cwd=tmp_path, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == ["shmkv.datadist", None, True]
    assert [file.name for file in real_one.iterdir()] == ["__init__.py"]
    assert (real_one / "__init__.py").read_text() == A_REAL_ONE
    plain = start(PLAIN, "-c", "import shmkv, llm_datadist; print(llm_datadist.NAME)", cwd=tmp_path, env=environment)
    assert plain.stdout == "the real one\n", plain.stderr


def test_one_that_lies_beside_the_script_is_passed_by_in_children_too(script: Any, tmp_path: Path, real_one: Path) -> None:
    shutil.move(real_one, tmp_path / "llm_datadist")
    path = script(CHILDREN)
    done = start(AS_MODULE, path, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert not (tmp_path / "llm_datadist" / "was imported").exists()


@pytest.mark.parametrize(("line", "text"), [
    ("llm_datadist.build_npu_tensors", "module 'llm_datadist' has no attribute 'build_npu_tensors'"),
    ("llm_datadist.llm_wrapper", "module 'llm_datadist' has no attribute 'llm_wrapper'"),
    ("llm_datadist.status.code_2_status", "module 'llm_datadist.status' has no attribute 'code_2_status'"),
    ("llm_datadist.LLMDataDist(llm_datadist.LLMRole.PROMPT, 1).pull_kv()", "'LLMDataDist' object has no attribute 'pull_kv'"),
])
def test_what_is_not_offered_names_the_page(script: Any, tmp_path: Path, line: str, text: str) -> None:
    path = script(f"import llm_datadist\n{line}")
    done = start(AS_MODULE, path, cwd=tmp_path)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"AttributeError: {text}")
    assert "docs/llm_datadist.md" in last
    assert "line 2, in <module>" in done.stderr


def test_a_submodule_that_is_not_offered_is_not_found(script: Any, tmp_path: Path) -> None:
    done = start(AS_MODULE, script("import llm_datadist.llm_wrapper"), cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.endswith("ModuleNotFoundError: No module named 'llm_datadist.llm_wrapper'\n")


def test_somebodys_own_sitecustomize_still_runs(script: Any, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text("import builtins\nbuiltins.CUSTOM = __file__\n")
    path = script("import sitecustomize, llm_datadist\nprint(CUSTOM, sitecustomize.__file__)")
    done = start(AS_MODULE, path, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path / "own")})
    own = str(tmp_path / "own" / "sitecustomize.py")
    assert (done.stdout, done.stderr) == (f"{own} {own}\n", "")


# -- children ----------------------------------------------------------------------------------------------------------

CHILDREN = """
import multiprocessing, subprocess, sys
from llm_datadist import CacheKey, LLMDataDist

def child(key, answers):
    from llm_datadist.status import LLMStatusCode
    answers.put((key, LLMDataDist.__module__, LLMStatusCode.__module__))

def parent_of_one(method, answers):
    started(method, answers, child)

def started(method, answers, *targets):
    context = multiprocessing.get_context(method)
    process = context.Process(target=targets[0], args=(CacheKey(1, 2), answers) if targets[0] is child else (method, answers))
    process.start()
    process.join(30)
    assert process.exitcode == 0, process.exitcode

if __name__ == "__main__":
    for method in ("spawn", "forkserver", "fork"):
        answers = multiprocessing.get_context(method).SimpleQueue()
        for target in (child, parent_of_one):
            started(method, answers, target)
            assert answers.get() == (CacheKey(1, 2), "shmkv.datadist", "shmkv.errors")
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        assert pool.map(abs, [-1, 2]) == [1, 2]
    line = "from llm_datadist import LLMRole; print(LLMRole.MIX)"
    assert subprocess.run([sys.executable, "-c", line], capture_output=True, check=True).stdout == b"LLMRole.MIX\\n"
"""


def test_processes_that_the_program_starts_have_the_names_too(script: Any, tmp_path: Path) -> None:
    done = start(AS_MODULE, script(CHILDREN), cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


PROMPT_AND_DECODER = """
import ctypes, multiprocessing, sys
from llm_datadist import CacheDesc, CacheKey, DataType, LLMClusterInfo, LLMConfig, LLMDataDist, LLMRole, LLMStatusCode

DESC = CacheDesc(4, [2, 1024], DataType.DT_INT8)
KEY = CacheKey(1, req_id=7)

def start(role, cluster_id):
    config = LLMConfig()
    config.sync_kv_timeout = 20000
    dist = LLMDataDist(role, cluster_id)
    dist.init(config.generate_options())
    return dist

def prompt(pipe):
    dist = start(LLMRole.PROMPT, 1)
    cache = dist.kv_cache_manager.allocate_cache(DESC, [KEY])
    for number, address in enumerate(cache.per_device_tensor_addrs[0]):
        ctypes.memset(address, 65 + number, 1024)
    pipe.send("filled")
    pipe.recv()
    dist.finalize()

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    pipe, other = context.Pipe()
    child = context.Process(target=prompt, args=(other,))
    child.start()
    assert pipe.poll(30) and pipe.recv() == "filled"
    dist = start(LLMRole.DECODER, 2)
    peer = LLMClusterInfo()
    peer.remote_cluster_id = 1
    peer.append_local_ip_info("127.0.0.1", 1)
    peer.append_remote_ip_info("127.0.0.1", 1)
    assert dist.link_clusters([peer], 20000)[0] == LLMStatusCode.LLM_SUCCESS
    cache = dist.kv_cache_manager.allocate_cache(DESC)
    dist.kv_cache_manager.pull_cache(KEY, cache, batch_index=1)
    for number, address in enumerate(cache.per_device_tensor_addrs[0]):
        assert ctypes.string_at(address, 2048) == bytes(1024) + bytes([65 + number]) * 1024
    pipe.send("enough")
    child.join(30)
    dist.finalize()
    print(child.exitcode)
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_prompt_that_is_a_child_of_its_decoder(script: Any, tmp_path: Path, namespace: Namespace, method: str) -> None:
    done = start(AS_MODULE, script(PROMPT_AND_DECODER), method, cwd=tmp_path, env={"SHMKV_NAMESPACE": namespace.name})
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")
    assert namespace.names() == set()


def test_children_have_the_same_path_as_under_plain_python(script: Any, tmp_path: Path) -> None:
    path = script("import multiprocessing, sys\n\ndef child(): print(sys.path)\n\nif __name__ == '__main__':\n"
                  "    process = multiprocessing.get_context('spawn').Process(target=child)\n    process.start()\n"
                  "    process.join(30)\n")
    plain, ours = (start(how, path, cwd=tmp_path) for how in (PLAIN, AS_MODULE))
    assert (ours.stdout, ours.stderr) == (plain.stdout, "")


def test_the_stand_in_is_there_only_when_asked_for(script: Any, tmp_path: Path) -> None:
    path = script("import torch_npu, torchair\ntorch_npu.npu.set_device('npu:3')\n"
                  "print(torch_npu.npu.current_device(), torchair.llm_datadist.create_npu_tensors.__name__)")
    done = start([*AS_MODULE, "--stub-npu"], path, cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("3 create_npu_tensors\n", "")
    assert "No module named 'torch_npu'" in start(AS_MODULE, path, cwd=tmp_path, env={"SHMKV_STUB_NPU": "1"}).stderr
