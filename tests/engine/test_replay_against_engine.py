"""The replay's rules against the installed engine's own code.

v1 is compared with the engine's compiled proposer. v2's rule is a GPU kernel: here Triton's interpreter runs its
source, which proves our reading of it but is no GPU run (corpus.py and kernel.py make one where there is a GPU).
"""

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).resolve().parent
DEADLINE_S = 600
KERNEL = "vllm/v1/worker/gpu/spec_decode/ngram/speculator.py"

spec = importlib.util.spec_from_file_location("replay_corpus", HERE / "corpus.py")
assert spec and spec.loader
corpus = importlib.util.module_from_spec(spec)
sys.modules["replay_corpus"] = corpus
spec.loader.exec_module(corpus)

pytestmark = pytest.mark.engine


def run(*command):
    """Standard output of a program that must succeed."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, f"{command} exited with {done.returncode}:\n{done.stderr[-4000:]}"
    return done.stdout


def asked(shared_path, given, *command):
    """What a program of this folder answers to the cases in `given`."""
    np.savez(shared_path / "in.npz", **given)
    print(run(*command[:2], shared_path / "in.npz", shared_path / "out.npz", *command[2:]).splitlines()[-1])
    return dict(np.load(shared_path / "out.npz"))


def test_v1_drafts_what_the_engines_proposer_drafts(engine_python, shared_path):
    given = corpus.cases(positions=220_000)
    found = asked(shared_path, given, engine_python, HERE / "propose.py")
    result = corpus.compare(given, found, "v1")
    print(result)
    assert result["positions"] >= 200_000
    assert result["compared"] >= 4 * 200_000
    assert 0.2 < result["with_draft"] / result["compared"] < 0.9
    assert result["differences"] == 0, result["first"]
    # These positions tell the rules apart, and one wrong token among them would be seen.
    assert corpus.compare(given, found, "v2")["differences"] > result["compared"] / 10
    found["drafts"][len(found["drafts"]) // 2] += 1
    assert corpus.compare(given, found, "v1")["differences"] == 1


def test_a_trial_drafts_each_setting_as_an_engine_that_was_loaded_with_it(engine_python, shared_path):
    given = corpus.cases(positions=3_000)
    found = asked(shared_path, given, engine_python, HERE / "propose.py", "trial")
    result = corpus.compare(given, found, "v1")
    print(result)
    assert result["compared"] >= 12_000 and result["with_draft"] > 4_000
    assert result["differences"] == 0, result["first"]


def test_v2_drafts_what_the_source_of_the_engines_kernel_drafts(engine_python, shared_path):
    if run(engine_python, "-c", "import importlib.util as i; print(i.find_spec('triton'))").strip() == "None":
        pytest.skip("the engine's Python has no Triton, whose interpreter would run the kernel")
    site = run(engine_python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])").strip()
    # The interpreter takes about 20 ms a position. 300 tokens are three of the kernel's blocks.
    given = corpus.cases(positions=600, longest=300, settings=2)
    found = asked(shared_path, given, engine_python, HERE / "kernel.py", Path(site) / KERNEL)
    result = corpus.compare(given, found, "v2")
    print(result)
    assert result["compared"] >= 1200
    assert result["differences"] == 0, result["first"]
    assert corpus.compare(given, found, "v1")["differences"] > result["compared"] / 10
