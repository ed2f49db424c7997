"""The random states of a process: torch's, Python's and NumPy's."""

from __future__ import annotations

import contextlib
import random
import sys

import torch
from torch import nn

from dgc.checkpoint.files import Tree
from dgc.warn import warn


def _devices(model: nn.Module) -> list[torch.device]:
    """The devices of a model beside the CPU, in order."""
    return sorted({p.device for p in model.parameters() if p.device.type == "cuda"}, key=str)


def random_states(model: nn.Module) -> Tree:
    states: Tree = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "cuda": [torch.cuda.get_rng_state(device) for device in _devices(model)],
    }
    if "numpy" in sys.modules:
        import numpy as np

        kind, key, *rest = np.random.get_state()
        if kind != "MT19937":
            raise TypeError(
                f"save_checkpoint: the bit generator of numpy.random must be MT19937, NumPy's own choice, "
                f"got {kind}"
            )
        states["numpy"] = (kind, list(map(int, key)), *rest)
    return states


def set_random_states(states: Tree, model: nn.Module, dry: bool = False) -> None:
    """Sets all random states of this process; with ``dry`` those of generators made for it, to see
    whether it can.
    """
    (torch.Generator().set_state if dry else torch.set_rng_state)(states["torch"])
    (random.Random() if dry else random).setstate(states["python"])
    devices = _devices(model)
    if len(devices) != len(states["cuda"]) and not dry:
        warn(
            f"the checkpoint has random states of {len(states['cuda'])} GPUs and the model is on {len(devices)}: what "
            "is drawn on GPUs will differ"
        )
    for device, state in zip(devices, states["cuda"], strict=False):
        torch.Generator(device).set_state(state) if dry else torch.cuda.set_rng_state(state, device)
    if "numpy" in states:
        kind, key, position, *_ = states["numpy"]
        # NumPy does not check the position.
        if kind != "MT19937" or len(key) != 624 or not 0 <= position <= 624:
            raise ValueError(
                "NumPy's random state must be one of numpy.random.get_state(), got something else"
            )
        with contextlib.suppress(ImportError):  # then nothing will be drawn from it
            import numpy as np

            (np.random.RandomState() if dry else np.random).set_state(states["numpy"])
