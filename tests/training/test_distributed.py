"""DistributedDataParallel and FSDP2 on two processes; what is checked stands in `ranks.py`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_ranks_agree_on_masks_and_losses_with_each_other_and_with_training_alone() -> None:
    launch = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "tests.training.ranks"]
    done = subprocess.run(
        [sys.executable, "-m", *launch],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
