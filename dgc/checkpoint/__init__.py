"""What is saved: model, optimizer, every rank's residuals and random states, whole or not at all.

A checkpoint is a folder that all ranks write into::

    manifest.json            the number of ranks; length and SHA-256 of each file; and of itself
    common-<hash>.pt         what is alike on all ranks, and rank 0's model whole: {"model", "optimizer", "extras",
                             "sparse"}
    rank-<r>-<hash>.pt       rank r's own: {"residuals", "buffers", "random", "extras"}

Files are named by what is in them, so a new checkpoint is written beside the one before, and becomes *the* checkpoint
when its manifest takes the place of the other's: one rename, after all ranks have said that theirs is on the disk. What
the new manifest does not name is then removed. Whenever a job is killed, the folder holds one or the other.

Rank 0's disk counts. Where the ranks have no file system in common, those whose file rank 0 does not see send it there,
one after the other, and get what they lack from there when they load. So a checkpoint is always in one place, survives
the loss of any other machine, and no rank holds more than one file in memory; the price is the network's time.
"""

from dgc.checkpoint.load import load_checkpoint
from dgc.checkpoint.residuals import Residuals
from dgc.checkpoint.save import save_checkpoint

__all__ = ["Residuals", "load_checkpoint", "save_checkpoint"]
