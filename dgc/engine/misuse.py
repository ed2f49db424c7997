"""Mistakes of a script that would lose gradients: found by the versions of tensors, and warned of
once.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from dgc.engine.backward import calling_scaler
from dgc.engine.optimizer_step import Applier
from dgc.engine.parameters import Parameters
from dgc.engine.step import UNKNOWN_VERSION, Phase, Step
from dgc.warn import warn

SYNCHRONIZED_TWICE = (  # Horovod's words
    "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). This can "
    "cause training slowdown. You may want to consider using optimizer.skip_synchronize() context if you use "
    "optimizer.synchronize() in your code."
)


class Misuse:
    """Notices gradients that are changed too late, and updates that are dropped.

    Args:
        parameters: whose gradients.
        applier: knows what their updates were.
    """

    def __init__(self, parameters: Parameters, applier: Applier):
        self._parameters, self._settings, self._applier = parameters, parameters.settings, applier
        self._warned = False

    def refuse_backward(self) -> None:
        """Refuses a backward pass beyond backward_passes_per_step.

        Raises:
            AssertionError: as stock's.
        """
        raise AssertionError(
            "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
            "backward_passes_per_step to accumulate gradients locally. If step() is called after each: another "
            "model's loss may run through these parameters, which requires_grad_(False) keeps out; or a former "
            "DistributedOptimizer of them is still held, by its scheduler or trainer; or "
            "torch.utils.checkpoint(use_reentrant=True) runs a layer more than once, which use_reentrant=False does "
            "not."
        )

    def refuse_unexchanged(self) -> None:
        """Refuses a synchronize() by a scaler's step(), where no gradient has come since the last
        step.
        """
        if self._settings.grad_scaler is not None and calling_scaler() is not None:
            raise RuntimeError(
                "scaler.step() has looked at gradients that were not exchanged yet, as no backward() has brought "
                "them since the last step, but a script's own lines perhaps; call optimizer.synchronize() before "
                "it, and before unscale_()"
            )

    def refuse_scaler(self, step: Step) -> None:
        """Refuses a step() by a scaler that has looked at gradients too early, or that the
        optimizer does not know.
        """
        if self._settings.grad_scaler is not None and step.phase is Phase.COLLECTING:
            why = "there were fewer backward passes than backward_passes_per_step"
            if all(step.delays[parameter] <= 0 for parameter in step.with_gradient):
                why = (
                    "torch.utils.checkpoint(use_reentrant=True) ran the backward pass of all of them within another "
                    "one, whose end is not told; use_reentrant=False has no such limit"
                )
            raise RuntimeError(
                f"scaler.step() has looked at gradients that were not exchanged yet, as {why}; call "
                "optimizer.synchronize() before it, and before unscale_()"
            )
        config = self._settings.config
        scaler = calling_scaler() if config.compresses and config.local_steps is None else None
        if scaler is not None and scaler is not self._settings.grad_scaler:
            raise RuntimeError(
                "grad_scaler must be the GradScaler whose step() calls this, got "
                f"{self._settings.grad_scaler!r}, so that gradients were kept with the scale (give it "
                "as grad_scaler=)"
            )

    def changes(self, step: Step) -> int:
        """How often the parameters were changed whose compressed updates wait for step()."""
        return sum(p._version for received in step.unapplied for p in received.parameters)

    def refuse_step_of_another(self, step: Step) -> None:
        """Refuses to drop an update that another optimizer has applied: it would be sent once more."""
        if self.changes(step) != step.changes:
            raise RuntimeError(
                "the optimizer that exchanges gradients must be the one whose step() is called, got "
                "parameters that were changed between backward() and zero_grad(), without its step() "
                "(register the optimizer that takes the step, such as the one in a wrapper)"
            )

    def warn_of_dropped_update(self) -> None:
        """Warns that step() did not follow an exchange of compressed gradients."""
        self.warn_of_loss(
            "step() was not called after an exchange of compressed gradients, so their update is dropped: what was "
            "sent is back in the residual. But u and v keep this backward pass's gradient. To drop it too, take "
            "saved = optimizer.residual_state_dict() before backward(), and call "
            "optimizer.load_residual_state_dict(saved) where the step is dropped. To find large gradients look at "
            "optimizer.report().gradient_norm, as p.grad holds an update; Config(nonfinite='skip') drops those that "
            "are not finite"
        )

    def warn_of_missing_momentum(self, of_adam: bool) -> None:
        """Warns that a single process continues with a state whose momentum was in residuals."""
        self.warn_of_loss(
            "the state is of several ranks, whose momentum was in their residuals, and one process "
            "begins without it: "
            + (
                "go on with two ranks or more, as AdamW's cannot be given to one"
                if of_adam
                else "save by dgc.save_checkpoint() and load by dgc.load_checkpoint(), which gives it what "
                "all ranks had"
            )
        )

    def warn_of_late_change(self, step: Step) -> None:
        """Warns where a gradient was changed after backward(), which had sent it by then."""
        if (changed := next(self._changed(step), None)) is not None:
            self.warn_of_loss(
                f"the gradient of {self._parameters.names[changed]} was changed after backward(), which "
                "had sent it by then: this had no effect, or on a GPU a part of it had; a model in "
                "DistributedDataParallel, which averages gradients, needs dgc.register_comm_hook() in "
                "place of the DistributedOptimizer; and to clip, give Config(clip_norm=...)"
            )

    def changed_update_warning(self, step: Step, before: str = "") -> str:
        """The warning, once, that a compressed parameter's update was changed. A dense gradient may
        be changed.
        """
        if self._warned or not step.unapplied:
            return ""
        compressed = {p for received in step.unapplied for p in received.parameters}
        changed = next(
            (
                p
                for p in self._changed(step)
                if p in compressed and p.grad is not None and self._applier.was_changed(p, step)
            ),
            None,
        )
        if changed is None:
            return ""
        self._warned = True
        return (
            f"{before}the gradient of {self._parameters.names[changed]} was changed between its exchange, in "
            "backward() or synchronize(), and step(). It is an update, many times larger than a gradient "
            "(optimizer.report().gradient_norm has the gradients' norm), and what was sent is no longer in the "
            "residual, so the difference is lost; to clip, give Config(clip_norm=...), which clips before anything "
            "is accumulated"
        )

    def warn_of_loss(self, message: str) -> None:
        """Warns, once for each optimizer."""
        if not self._warned:
            self._warned = True
            warn(message)

    def _changed(self, step: Step) -> Iterator[Tensor]:
        """The parameters whose gradient was changed. A scaler's ``unscale_`` does not count as a
        change.
        """
        for p, (gradient, version) in step.versions.items():
            if (
                (g := p.grad) is None
                or gradient() is not g
                or version not in (UNKNOWN_VERSION, g._version)
            ):
                yield p
