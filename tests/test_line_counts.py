"""What gcov counts in generated C, told by the lines of the Cython source."""
from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import line_counts
import pytest

GENERATED = """#include <stdlib.h>
/* "made/_some.pyx":3
 * cdef int half(int n):             # <<<<<<<<<<<<<<
*/
static int half(int n) {
  /* "made/_some.pyx":4
 *     if n % 2:             # <<<<<<<<<<<<<<
*/
  if (n % 2) {

    /* "made/_some.pyx":5
 *         return -1             # <<<<<<<<<<<<<<
*/
    return -1;
  }
  /* "made/_some.pyx":6
 *     return n // 2             # <<<<<<<<<<<<<<
*/
  return n / 2;
}
static int nobodys(int n) { return n ? 1 : 2; }
int main(int argc, char **argv) { return half(argc > 1 ? atoi(argv[1]) : 0) + 0 * (argc > 9 ? nobodys(1) : 0); }
"""


@pytest.mark.skipif(shutil.which("gcov") is None or shutil.which("gcc") is None, reason="needs gcc and gcov")
@pytest.mark.parametrize(("numbers", "reached", "ways"), [
    ([4], [3, 4, 6], [0, 1]), ([3], [3, 4, 5], [1, 0]), ([4, 3, 8], [3, 4, 5, 6], [1, 2]),
])
def test_lines_and_branches_are_those_of_the_source(tmp_path: Path, numbers: list[int], reached: list[int],
                                                    ways: list[int]) -> None:
    build = tmp_path / "build" / "temp.some" / "shmkv"
    build.mkdir(parents=True)
    (tmp_path / "shmkv").mkdir()
    (tmp_path / "shmkv" / "_some.c").write_text(GENERATED)
    command = ["gcc", "-O0", "--coverage", "-c", "shmkv/_some.c", "-o", str(build / "_some.o")]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=60)
    subprocess.run(["gcc", "--coverage", str(build / "_some.o"), "-o", "program"], cwd=tmp_path, check=True, timeout=60)
    for number in numbers:
        subprocess.run(["./program", str(number)], cwd=tmp_path, check=False, timeout=60)
    found = line_counts.read(tmp_path)
    assert set(found) == {"_some.pyx"}
    assert sorted(found["_some.pyx"]) == [3, 4, 5, 6], "what belongs to no line of the source is left out"
    assert [number for number, line in sorted(found["_some.pyx"].items()) if line.count] == reached
    assert found["_some.pyx"][4].branches == {0: ways}
