"""Check promises about the machine code for sm_80, sm_89, sm_90 and sm_120. It needs no GPU."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.slow  # a subprocess compiles for half a minute
CAPABILITIES = (80, 90, 120)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Return the memory accesses of each kernel on a GPU of a capability."""

    @functools.cache
    def of(capability):
        env = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
        env["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))
        command = [sys.executable, Path(__file__).with_name("machine_code.py"), str(capability)]
        result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, result.stderr[-3000:]
        return json.loads(result.stdout.splitlines()[-1])

    return of


def wide(access):
    return ".v4.b32" in access or ".v4.u32" in access


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("gate", ["swiglu", "clamped swiglu", "geglu"])
def test_a_gate_loads_before_it_stores(gate, capability, compiled):
    """Gradients may overwrite the inputs: a thread has loaded all it needs, and no other thread reads that part."""
    found = compiled(capability)[gate]
    kinds = [access[:2] for access in found["accesses"]]
    assert kinds == sorted(kinds) and set(kinds) == {"ld", "st"}, found
    assert all(map(wide, found["accesses"]))
    assert found["shared"] == 0


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("case", ["rows", "rows anywhere", "statistics"])
def test_logits_are_loaded_16_bytes_at_a_time(case, capability, compiled):
    """Only a few accesses are narrow.

    They are the target's own logit, the logits before it if it ties with the maximum, and stores at both ends of rows
    that start anywhere.
    """
    accesses = compiled(capability)[case]["accesses"]
    narrow = [a for a in accesses if "16" in a]
    loads = sum(a.startswith("ld") for a in narrow)
    stores = sum(a.startswith("st") for a in narrow)
    assert loads == 1 + 8 and stores <= (16 if case == "rows anywhere" else 0), accesses
    sweeps = sum(wide(a) for a in accesses if a.startswith("ld"))
    assert sweeps == (1 if case == "statistics" else 2)
    assert any(wide(a) for a in accesses if a.startswith("st")) == (case != "statistics")


@pytest.mark.parametrize(
    "source, capability",
    [
        pytest.param("", 89, id="89"),
        pytest.param("", 90, id="90"),
        pytest.param("", 120, id="120"),
        pytest.param(" of fp32", 90, id="fp32-90"),
    ],
)
@pytest.mark.parametrize("case", ["rows", "both", "columns", "by row", "by wide row", "by column"])
def test_fp8_numbers_change_threads_in_words(case, source, capability, compiled):
    """Single bytes that move between threads, or are joined from registers, came out wrong: see `_columns_kernel`."""
    found = compiled(capability)[f"float8 {case}{source}"]
    assert found["bytes_moved"] == 0
    assert all("b8" not in access and "b16" not in access for access in found["inside"]), found["inside"]
    large = [access for access in found["accesses"] if "v4" in access]
    assert len(found["accesses"]) - len(large) <= 2 and all(map(wide, large))  # besides the maxima and the scale


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("direction", ["convolution", "convolution, backward"])
def test_a_convolution_loads_each_token_once(direction, capability, compiled):
    """It loads each token before a program, of its first run and of each run ahead once, not through shared memory.

    The backward pass also loads the tokens after the program.
    """
    before, runs = 3, 2 * 8
    expected = before + runs if direction == "convolution" else before + runs + 2 * before
    in_three = direction.replace("convolution", "convolution in three")
    for name in (direction, f"{direction} of fp32", in_three):
        found = compiled(capability)[name]
        vectors = [a for a in found["accesses"] if a.startswith("ld") and (".v4." in a or ".v2." in a)]
        assert len(vectors) == expected, found["accesses"]
        assert found["shared"] == 0
