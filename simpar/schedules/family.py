"""A named family of schedules: its builder, and what it asks of the pipeline's shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from simpar.errors import InputError, Violation
from simpar.schedules.schedule import Schedule

Order = Callable[..., Schedule]
"""``order(num_ranks, num_microbatches, virtual_stages, **options)``, called only with a shape that fits."""

Rules = Callable[..., Iterator[Violation]]
"""Same arguments as `Order`: what is wrong with the shape, beyond what every family asks."""


def no_rules(*shape: int, **options: object) -> Iterator[Violation]:
    """Every shape fits."""
    return iter(())


@dataclass(frozen=True, slots=True)
class ScheduleFamily:
    """A schedule as the registry knows it.

    Attributes:
        name: its name in scenario files.
        summary: what it does, in one line.
        source: the paper or framework it comes from.
        order: makes the schedule.
        rules: the family's own demands on (num_ranks, num_microbatches, virtual_stages).
        virtual_stages: the only value of `virtual_stages` it takes; None if it is free.
        splits_backward: whether it runs backwards as I and W.
        replicas: copies of the model that the pipeline holds.
        options: names of the keyword options that `order` takes.
        torch_class: the torch.distributed.pipelining class with the same order; "" if there is none.
        wants_times: the order depends on stage times: options `f`, `i`, `w` (one value per rank), `send`, `size`, `kept`.
    """

    name: str
    summary: str
    source: str
    order: Order
    rules: Rules = no_rules
    virtual_stages: int | None = None
    splits_backward: bool = False
    replicas: int = 1
    options: tuple[str, ...] = ()
    torch_class: str = ""
    wants_times: bool = False

    def requirements(
        self, num_ranks: int, num_microbatches: int, virtual_stages: int | None = None, **options: object
    ) -> list[Violation]:
        """Everything that keeps this shape from being built; empty if it can be."""
        v = self._virtual_stages(virtual_stages)
        shape = {"num_ranks": num_ranks, "num_microbatches": num_microbatches, "virtual_stages": v}
        found = [
            Violation(field, value, "must be at least 1", "any positive integer") for field, value in shape.items() if value < 1
        ]
        if self.virtual_stages is not None and v != self.virtual_stages:
            rule = f"schedule {self.name!r} has exactly {self.virtual_stages} virtual stage(s) per rank"
            found.append(Violation("virtual_stages", v, rule, f"set it to {self.virtual_stages}"))
        known = ", ".join(self.options) or "none"
        found.extend(
            Violation(option, value, f"schedule {self.name!r} has no such option", f"its options: {known}")
            for option, value in options.items()
            if option not in self.options
        )
        return found or list(self.rules(num_ranks, num_microbatches, v, **options))

    def build(self, num_ranks: int, num_microbatches: int, virtual_stages: int | None = None, **options: object) -> Schedule:
        """The schedule of p ranks, m microbatches and v virtual stages per rank (None: the family's, or 1).

        Raises:
            InputError: the shape does not fit; lists every requirement that it breaks.
        """
        violations = self.requirements(num_ranks, num_microbatches, virtual_stages, **options)
        if violations:
            raise InputError(violations)
        return self.order(num_ranks, num_microbatches, self._virtual_stages(virtual_stages), **options)

    def _virtual_stages(self, given: int | None) -> int:
        return given if given is not None else (self.virtual_stages or 1)
