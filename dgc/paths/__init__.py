"""The paths of a bucket's gradients to their averaged update.

A path is a generator that yields the collectives it needs and is sent their results; it does no
I/O. So the same path serves Horovod, torch.distributed and N ranks in one process, and can be
tested with none of them.
"""
