"""One training step of one rank, from the hooks of the backward pass to the update of the
parameters.
"""
