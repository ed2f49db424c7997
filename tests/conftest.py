"""One thread for each rank, as in the processes that tests launch: sums over threads differ in the last bit.

Where there is no GPU, Triton's kernels run on the CPU. Ctrl-C ends what tests start, also in a shell's background job,
which ignores it.
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

kernels.compile_ahead(torch.float32, torch.float64)  # tests are of these loops, not of what stands in for them
