"""A job for test_files.py under torchrun --max-restarts: one worker kills itself between the two phases of a
reduce exchange, and after the restart all go on from the last checkpoint.
"""

import os
import sys
from pathlib import Path

import torch

import dgc

sys.path.insert(0, str(Path(__file__).parents[1]))
from laws import die_between_phases, flat, loss, model, train

FOLDER, FATAL, LAST = sys.argv[1], 4, 7
CONFIG = dgc.Config(sparsity=0.95, exchange="reduce")

rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
# A meeting place for each attempt: at the agent's, gloo's processes do not always meet again (torch 2.13).
torch.distributed.init_process_group(
    "gloo", f"file://{FOLDER}/meeting-{attempt}", rank=rank, world_size=2
)
network = model()
optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-2)
optimizer = dgc.DistributedOptimizer(optimizer, network.named_parameters(), CONFIG)
begin = 0
if os.path.exists(f"{FOLDER}/checkpoint/manifest.json"):
    begin = dgc.load_checkpoint(f"{FOLDER}/checkpoint", network, optimizer)["step"]
for step in range(begin, LAST):
    optimizer.zero_grad()
    loss(network, rank, step).backward()
    if (step, attempt, rank) == (FATAL, 0, 1):
        die_between_phases()
    optimizer.step()
    dgc.save_checkpoint(f"{FOLDER}/checkpoint", network, optimizer, {"step": step + 1})
straight, whole = train(range(LAST), CONFIG)
v = [
    torch.cat([x.flatten() for x in o.residual_state_dict()["v"].values()])
    for o in (optimizer, whole)
]
torch.save(
    (attempt, begin, torch.equal(flat(network), flat(straight)) and torch.equal(*v)),
    f"{FOLDER}/{rank}.pt",
)
