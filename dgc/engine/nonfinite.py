"""Gradients that are not finite: agreed on before an exchange, found in its messages, or reported a
step later by a GPU.
"""

from __future__ import annotations

import math
from collections import defaultdict

import torch
from torch import Tensor

from dgc.collective import Collective
from dgc.engine.parameters import Parameters, sum_of_shards
from dgc.engine.step import Step
from dgc.paths.finite import DeferredVerdict
from dgc.trace import stage
from dgc.transport.run import PathRun, wait_for_own_stream
from dgc.warn import LOG, warn


class NonFinite:
    """Keeps the errors that were found until all ranks raise them.

    Args:
        parameters: whose gradients.
    """

    def __init__(self, parameters: Parameters):
        self._parameters, self._settings = parameters, parameters.settings
        self._found: list[FloatingPointError | ValueError] = []  # in messages
        # The name of an exchange, and the verdict on its sum.
        self._deferred: list[tuple[str, DeferredVerdict]] = []
        self._warned = False

    @property
    def is_error(self) -> bool:
        """Whether a gradient that is not finite is an error: not where nothing is kept, nor
        clipped, as in Horovod.
        """
        return bool(self._parameters.residuals()) or self._settings.config.clip_norm is not None

    def all_finite(self, gradients: list[Tensor], step: Step) -> bool:
        """Whether all gradients are finite, on all ranks: one collective, and one host-device
        synchronisation.

        Args:
            gradients: of this rank.
            step: that they belong to, with the loss's scale.

        Raises:
            ValueError: on all ranks alike, if they have scaled their losses by different numbers.
        """
        values = [g.coalesce().values() if g.is_sparse else g for g in gradients]
        # A scaled update goes into p.grad, and with what is pending it may be larger than the
        # gradient: by this much.
        room = 1.0 if self._settings.grad_scaler is None else 2.0**-24
        device, by_kind = (
            self._parameters.device,
            defaultdict[tuple[torch.device, torch.dtype], list[Tensor]](list),
        )
        for value in values:
            if value.numel():
                by_kind[value.device, value.dtype].append(value)
        fits = [
            (
                torch.stack(torch._foreach_norm(same, math.inf))
                <= torch.finfo(dtype).max * (room if dtype != torch.float16 else 1.0)
            )
            .all()
            .to(device)
            for (_, dtype), same in by_kind.items()
        ]
        none_is_bad = torch.stack(fits).all() if fits else torch.ones((), device=device)
        one = torch.ones((), dtype=torch.float64, device=device)
        # Which is on the device by now.
        inverse = one if step.inverse is None else step.inverse.tensor.double()
        bad = Collective(
            "all_reduce", torch.stack([one - none_is_bad.double(), one, inverse, inverse * inverse])
        )
        step.count(bad)
        with stage("dgc::exchange"):
            total = self._settings.transport.start(bad, "dgc.finite")()
        found, n, inverses, squares = sum_of_shards(total, self._parameters.first).tolist()
        if n * squares - inverses**2 > 1e-9 * n * squares:  # n^2 times their variance
            everyones = self._settings.transport.start(
                Collective("all_gather", (1 / inverse).view(1)), "dgc.scale"
            )()
            raise ValueError(
                "the loss's scale must be the same on all ranks, got, rank by rank, "
                f"{everyones.flatten().tolist()} (load one rank's scaler.state_dict() on all)"
            )
        if found:
            LOG.info(
                "step %d is skipped on all ranks: a gradient was not finite", self._parameters.step
            )
        return not found

    def expect(self, name: str, verdict: DeferredVerdict) -> None:
        """Notes a verdict that is still to come."""
        self._deferred.append((name, verdict))

    def poll(self) -> None:
        """Reads the verdicts of the last step, which a GPU gives asynchronously."""
        for device in {residual.v.device for residual in self._parameters.compressed_residuals()}:
            wait_for_own_stream(device)  # which may be using v
        self._found += [
            error for _, verdict in self._deferred if (error := verdict.damaged) is not None
        ]
        self._deferred = [(name, verdict) for name, verdict in self._deferred if verdict.not_finite]

    def raise_found(self, step: Step) -> None:
        """Raises the error that was found. All ranks have found the same, and call this at the same
        place.
        """
        if (error := self.take_found(step)) is not None:
            raise error

    def take_found(self, step: Step) -> FloatingPointError | ValueError | None:
        """Returns the error that was found, and forgets it. All ranks call this, and ``step``
        counts the bytes that they send for it.
        """
        self.poll()
        for name, verdict in self._deferred:
            # In an elastic job a rank that has joined since would not take part in this.
            asked = not self._settings.elastic
            blame = (
                ""
                if not asked
                else PathRun(
                    verdict.blame(), self._settings.transport, f"{name}.blame", step.count
                ).finish()
            )
            if self.is_error:
                self._found.append(verdict.error(blame))
            else:
                self.warn_if_applied(str(verdict.error(blame)))
        error = self._found[0] if self._found else None
        self._found, self._deferred = [], []
        return error

    def warn_if_applied(self, blame: str) -> None:
        """Warns once, on rank 0, where a gradient that is not finite is applied: all ranks have
        found the same.

        Args:
            blame: whose gradient; "" if there is none.
        """
        if blame and not self._warned and self._settings.world.rank == 0:
            self._warned = True
            warn(
                f"{blame}. It is applied as it is, as by Horovod: none of this optimizer's parameters is compressed. "
                "Config(nonfinite='skip') leaves out such steps"
            )

    def forget(self) -> None:
        """Forgets what was found, as its step has failed. Waits until v is restored."""
        self.poll()
        self._found, self._deferred = [], []
