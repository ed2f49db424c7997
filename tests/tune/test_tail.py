"""What is shown of a trial that failed: its error, and not what a launcher prints below."""

import subprocess
import sys

from dgc.tune.trial import TAIL_LINES, tail


def test_the_error_is_shown_and_not_torchruns_own_stack(tmp_path):
    script = tmp_path / "bad.py"
    script.write_text("raise ValueError('the rate is too high')\n")
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", script], text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=100)
    assert done.returncode and "ChildFailedError" in done.stdout
    assert tail(done.stdout).endswith("    ValueError: the rate is too high")


def test_of_other_output_the_last_lines_are_shown():
    lines = [f"line {i}" for i in range(40)]
    assert tail("\n".join(lines)) == "\n".join(f"    {line}" for line in lines[-TAIL_LINES:])
    assert tail("") == "    (nothing)"
    alone = "E1129 torch/distributed/elastic/api.py:1] failed (exitcode: -9) local_rank: 0"
    assert tail(alone) == f"    {alone}"  # torchrun alone has said something
