"""One thread for each rank, as in the processes that tests launch: sums over threads differ in the last bit."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import torch

torch.set_num_threads(1)
