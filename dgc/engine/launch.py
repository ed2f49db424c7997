"""Buckets on their way: launched in order, during the backward pass where that is possible."""

from __future__ import annotations

import torch
from torch import Tensor

from dgc.compression.device import refuse_capture
from dgc.engine.buckets import ParameterBucket
from dgc.engine.misuse import Misuse
from dgc.engine.nodes import Nodes
from dgc.engine.optimizer_step import Applier
from dgc.engine.outgoing import Outgoing
from dgc.engine.parameters import Parameters
from dgc.engine.progress import Progress
from dgc.engine.report import Ledger
from dgc.engine.settings import Settings
from dgc.engine.step import Delivery, Flight, Step
from dgc.transport.streams import StreamedRun


class Launcher:
    """Starts the exchanges of a step.

    Args:
        settings, parameters, outgoing, nodes, applier, progress, misuse, ledger: of the same optimizer.
    """

    def __init__(self, settings: Settings, parameters: Parameters, outgoing: Outgoing, nodes: Nodes,
                 applier: Applier, progress: Progress, misuse: Misuse, ledger: Ledger):
        self._settings, self._parameters, self._outgoing, self._nodes = settings, parameters, outgoing, nodes
        self._applier, self._progress, self._misuse, self._ledger = applier, progress, misuse, ledger

    @property
    def launches_early(self) -> bool:
        """Whether anything leaves before the backward pass has ended: whether all gradients are finite, and their
        norm, needs all of them; and it must not wait for ranks that may have none, and be at another optimizer.
        """
        return not (self._settings.waits or self._settings.config.clips_globally or self._nodes.must_level)

    def launch_ready(self, step: Step) -> None:
        """Launches what is complete, always in the same order: torch.distributed pairs collectives up by order."""
        if not self.launches_early:
            return
        buckets = self._parameters.buckets
        with step.marked(), self._progress.compressing():
            while step.launched < len(buckets) and step.missing[buckets[step.launched]] == 0:
                self._launch(buckets[step.launched], step)

    def launch_rest(self, step: Step) -> None:
        """Launches what has not been launched."""
        refuse_capture(self._parameters.device)
        for bucket in self._parameters.buckets[step.launched:]:
            self._launch(bucket, step)
        step.leave_node(wait=True)  # so that ranks that fail together have begun the same

    def _launch(self, bucket: ParameterBucket, step: Step) -> None:
        step.launched += 1
        taking_part = self._parameters.taking_part(bucket.parameters, step.fired)
        step.wait_for_gradients()
        self._reopen(bucket, taking_part, step)
        departures = list(self._outgoing.departures(bucket, taking_part, step, self._progress.config()))
        if not departures and bucket.kept is not None:
            bucket.kept.rest()
        self._misuse.note(taking_part)
        for departure in departures:
            step.leave_node(wait=False)
            step.in_flight.append(Flight(bucket, departure.parameters, StreamedRun(
                departure.parameters[0].device, departure.path, self._settings.transport, departure.name,
                self._ledger.counting(step))))

    def reopen_rest(self, step: Step) -> None:
        """Takes earlier updates of this step out of the gradients that are still to be launched."""
        if step.earlier:
            step.wait_for_gradients()
            for bucket in self._parameters.buckets[step.launched:]:
                self._reopen(bucket, self._parameters.taking_part(bucket.parameters, step.fired), step)

    @torch.no_grad()
    def _reopen(self, bucket: ParameterBucket, taking_part: list[Tensor], step: Step) -> None:
        """Has a bucket's gradients come together with those of an earlier exchange, whose update waits for step():
        what was sent goes back into v, and ``p.grad`` keeps what a backward pass has added to the update.
        """
        for delivery in [one for one in step.earlier if one.bucket is bucket]:
            again = [p for p in delivery.parameters if p in set(taking_part)]
            self._applier.take_back(delivery, again)
            held = [p for p in again if self._misuse.holds_update(p)]
            self._applier.subtract(delivery, held, step)
            if len(held) < len(again):
                self._misuse.tell_of_dropped_update()
            step.earlier.remove(delivery)
            if rest := [p for p in delivery.parameters if p not in set(again)]:
                step.deliveries.append(Delivery(bucket, rest, delivery.update))

    def average_in_node(self, step: Step) -> None:
        """Averages all gradients within the node, as their norm is wanted before any is exchanged among nodes.

        Raises:
            ValueError: one of them is sparse.
        """
        step.wait_for_gradients()
        exchanges = []
        for bucket in self._parameters.buckets:
            present = self._parameters.taking_part(bucket.parameters, step.fired)
            if sparse := self._outgoing.sparse_among(present):
                raise ValueError(f"the gradient of {self._parameters.names[sparse[0]]} must be dense, got a sparse "
                                 "one: Config: hierarchical is in force, and clip_norm needs the norm of the node's "
                                 "mean (give sparse_as_dense=True)")
            if present:
                exchanges.append(StreamedRun(
                    present[0].device, self._nodes.mean(bucket, present, step), self._settings.transport,
                    f"{bucket.name}.node", self._ledger.counting(step)))
        for exchange in exchanges:
            exchange.finish()
