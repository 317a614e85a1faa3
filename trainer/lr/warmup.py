"""A warm-up before any other scheduler."""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import LRScheduler


class WarmupLR(LRScheduler):
    """A linear warm-up to where another scheduler begins; then that one.

    After n steps of ``warmup_steps`` the rate is the first one of the other scheduler times
    ``start_factor + (1 - start_factor) * n / warmup_steps``; from there on each step is one of the
    other's, which has not moved until then.

    Args:
        scheduler: any of torch's or ours, ``ReduceLROnPlateau`` too, that has taken no step.  The
            script steps this one only, with the other's arguments.
        warmup_steps: how many.
        start_factor: of the first rate.

    Raises:
        TypeError: no scheduler.
        ValueError: it has taken a step; ``warmup_steps`` is below 1; ``start_factor`` is not from 0
            to 1.

    Example::

        scheduler = WarmupLR(CosineAnnealingLR(optimizer, T_max=9000), warmup_steps=1000)
    """

    def __init__(
        self, scheduler: LRScheduler, warmup_steps: int, start_factor: float = 0.0
    ) -> None:
        if not isinstance(scheduler, LRScheduler):
            raise TypeError(f"scheduler: expected a scheduler, got {type(scheduler).__name__}")
        if scheduler.last_epoch != 0:
            raise ValueError(
                f"scheduler: expected one that has taken no step, got {scheduler.last_epoch}"
            )
        if isinstance(warmup_steps, bool) or warmup_steps < 1:
            raise ValueError(f"warmup_steps: expected 1 or more, got {warmup_steps!r}")
        if not 0 <= start_factor <= 1:
            raise ValueError(f"start_factor: expected 0 to 1, got {start_factor!r}")
        # the base's constructor would step: this one has no rates of its own
        self.optimizer = scheduler.optimizer
        self._schedulers = [scheduler]  # as in torch's schedulers that hold others
        self.warmup_steps, self.start_factor = warmup_steps, start_factor
        self.last_epoch = 0
        self.first_lrs = [float(rate) for rate in scheduler.get_last_lr()]
        self._warm()

    def step(self, *args: Any, **kwargs: Any) -> None:
        """One step: of the warm-up, or of the other scheduler with its arguments."""
        self.last_epoch += 1
        if self.last_epoch <= self.warmup_steps:
            self._warm()
            return
        self._schedulers[0].step(*args, **kwargs)
        self._last_lr = self._schedulers[0].get_last_lr()

    def _warm(self) -> None:
        part = min(self.last_epoch / self.warmup_steps, 1.0)
        factor = self.start_factor + (1.0 - self.start_factor) * part
        self._last_lr = [rate * factor for rate in self.first_lrs]
        for group, rate in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            group["lr"] = rate

    def state_dict(self) -> dict[str, Any]:
        """How far it has come, with the other scheduler's state."""
        return {
            "last_epoch": self.last_epoch,
            "first_lrs": list(self.first_lrs),
            "_last_lr": list(self._last_lr),
            "scheduler": self._schedulers[0].state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from what :meth:`state_dict` gave; the rates are the optimizer's state."""
        self.last_epoch = state_dict["last_epoch"]
        self.first_lrs = list(state_dict["first_lrs"])
        self._last_lr = list(state_dict["_last_lr"])
        self._schedulers[0].load_state_dict(state_dict["scheduler"])
