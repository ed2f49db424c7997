"""One thread for each rank, as in the processes that tests launch: sums over threads differ in the last bit.

Where there is no GPU, Triton's kernels run on the CPU. Ctrl-C ends what tests start, also in a shell's background job,
which ignores it. Files that take long come first, else the last of them would keep one process busy when the others
are done (pytest -n).
"""

import os
import signal

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import torch

signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported, which torch alone does not

from dgc.compression import kernels  # noqa: E402 (after what is set above)

# Tests are of these loops, not of what stands in for them.
kernels.compile_ahead(torch.float32, torch.float64)

TAKE_LONG = (
    "test_peers.py",
    "test_cifar10.py",
    "test_ptb.py",
    "test_reproduce.py",
    "test_examples.py",  # make long
    "test_stock.py",
    "test_laws.py",
    "test_processes.py",
    "test_faults.py",
    "test_kernels_cuda.py",
    "test_asynchronous.py",
    "test_ddp.py",
    "test_horovod_contract.py",
    "test_shards.py",
    "test_kernels.py",
    "test_nodes.py",
    "test_adaptive.py",
    "test_compiled.py",
    "test_beside_horovod.py",
    "test_files.py",
    "test_owners_kernels.py",
    "test_cli.py",
    "test_resume.py",
    "test_tune.py",
    "test_jit.py",
)


def pytest_collection_modifyitems(items):
    items.sort(
        key=lambda item: (
            TAKE_LONG.index(item.path.name) if item.path.name in TAKE_LONG else len(TAKE_LONG)
        )
    )
