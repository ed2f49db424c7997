"""Who calls: the optimizer that replaces Horovod's, the hook of DistributedDataParallel, and what
they refuse.
"""
