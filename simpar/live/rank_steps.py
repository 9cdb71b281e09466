"""Training steps of one rank: single stage, or torch's own pipeline schedules with receives that never arrive."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage, _utils, schedules
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional

from simpar.live.rank_model import Plan, Stage

TORCH_SCHEDULES = {
    "1f1b": "1F1B", "gpipe": "GPipe", "interleaved": "Interleaved1F1B", "interleaved_1f1b": "Interleaved1F1B",
    "interleaved_bfs": "LoopedBFS", "interleaved_zb": "InterleavedZeroBubble", "zb-v": "ZBVZeroBubble", "dualpipe-v": "DualPipeV",
}  # fmt: skip


_DESCRIBES_GRADIENTS = "input_grads" in inspect.signature(PipelineStage.__init__).parameters
"""Since torch 2.13 a stage is told the shapes of its gradients; before, it takes those of its inputs and outputs."""


def loss_of(out: Any, target: Any) -> Any:
    """Cross-entropy in fp32, as torchtitan's."""
    return functional.cross_entropy(out.flatten(0, 1).float(), target.flatten(0, 1))


class Job:
    """One rank's stages, optimizers and step.

    Attributes:
        stages: modules, in the order of their virtual stages.
        followed: what is there before the first step besides parameters: tokens and targets.
    """

    def __init__(self, plan: Plan, mesh: Any, stages: list[Stage], device: str, *, fused: bool) -> None:
        self.plan, self.stages, self.device = plan, stages, device
        # Fused updates and norms take tensors of one mesh at a time: experts have one of their own.
        meshes: dict[Any, list[Any]] = {}
        for parameter in (p for stage in stages for p in stage.parameters()):
            meshes.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
        self.parameters = list(meshes.values())
        self.optimizers = []
        if plan["optimizer"] != "none":
            more = {"lr": 1e-6, "weight_decay": 0.1, "fused": fused, "foreach": False}
            self.optimizers = [torch.optim.AdamW(own, **more) for own in self.parameters]
        self.clip = fused
        count = plan["num_microbatches"] if plan["world"]["pp"] > 1 else 1
        shape = (plan["micro_batch_size"] * count, plan["sequence_length"] // plan["world"]["cp"])
        first, last = any(s.embedding is not None for s in stages), any(s.output is not None for s in stages)
        # Random values: on constant data the chip draws less power and runs faster.
        # Tokens are of this rank's part of the vocabulary: the rows of others are zero until they are summed, and nobody adds them.
        part = -(-plan["vocab"] // plan["world"]["tp"])
        begin = plan["coordinates"]["tp"] * part
        end = min(begin + part, plan["vocab"])
        self.tokens = torch.randint(begin, end, shape, device=device) if first or not last else None
        self.target = torch.randint(0, plan["vocab"], shape, device=device) if last else None
        self.followed = [t for t in (self.tokens, self.target) if t is not None]
        self._step: Callable[[], None] = self._plain
        if plan["world"]["pp"] > 1:
            self._step = self._pipeline(mesh, first, last)

    def step(self) -> None:
        """Forward, backward, update of one step."""
        split = self.plan["world"]["tp"] > 1
        context: AbstractContextManager[Any] = loss_parallel() if split else nullcontext()
        with context:
            self._step()
        for own, optimizer in zip(self.parameters, self.optimizers, strict=False):
            if self.clip:
                torch.nn.utils.clip_grad_norm_(own, 1.0, foreach=True)
            optimizer.step()
        for stage in self.stages:
            stage.zero_grad()

    def make_states(self) -> None:
        """Make the optimizers' states, which are there from the second step on, with gradients of zero."""
        for own, optimizer in zip(self.parameters, self.optimizers, strict=False):
            for parameter in own:
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            optimizer.zero_grad()

    def _plain(self) -> None:
        for _ in range(self.plan["num_microbatches"]):
            out = self.stages[0](self.tokens)
            loss = loss_of(out, self.target)
            del out
            loss.backward()

    def _pipeline(self, mesh: Any, first: bool, last: bool) -> Callable[[], None]:
        plan, group = self.plan, mesh["pp"].get_group()
        batch, count = plan["micro_batch_size"], plan["num_microbatches"]
        tokens = plan["sequence_length"] // plan["world"]["cp"]
        local = tokens // (plan["world"]["tp"] if plan["sequence_parallel"] else 1)

        def middle(*, gradient: bool = False) -> Any:
            shape = (batch, local, plan["model"]["hidden_size"])
            return torch.empty(shape, device=self.device, dtype=torch.bfloat16, requires_grad=gradient)

        held = []
        for module, index in zip(self.stages, plan["stage_indices"], strict=True):
            ids = torch.zeros(batch, tokens, dtype=torch.long, device=self.device)
            head, begin = module.output is not None, module.embedding is not None
            logits = _Like(batch, tokens, plan["vocab"] // plan["world"]["tp"], self.device) if head else None
            out = logits.tensor() if logits is not None else middle(gradient=True)
            known: dict[str, Any] = {"input_args": (ids if begin else middle(gradient=True),), "output_args": (out,)}
            if _DESCRIBES_GRADIENTS:
                known |= {"input_grads": (None if begin else middle(),), "output_grads": (torch.empty_like(out).detach(),)}
            held.append(PipelineStage(module, index, plan["num_stages"], torch.device(self.device), group=group, **known))
        cls = schedules.get_schedule_class(TORCH_SCHEDULES[plan["schedule"]])
        own = held if issubclass(cls, schedules.PipelineScheduleMulti) else held[0]
        schedule = cls(own, count, loss_fn=loss_of)
        if hasattr(schedule, "_warmup_p2p"):
            # Shapes are given above: nothing is asked of neighbours, which are not there (torch before 2.13 asks nobody then).
            schedule._warmup_p2p = _shapes_are_known

        no_outputs = {"return_outputs": False} if "return_outputs" in inspect.signature(cls.step).parameters else {}

        def run() -> None:
            args = (self.tokens,) if first else ()
            more: dict[str, Any] = {"target": self.target, "losses": []} if last else {}
            schedule.step(*args, **more, **no_outputs)

        return run


class _Like:
    """Logits as a pipeline stage describes them."""

    def __init__(self, batch: int, tokens: int, vocab: int, device: str) -> None:
        self.shape, self.device = (batch, tokens, vocab), device

    def tensor(self) -> Any:
        """An empty one."""
        return torch.empty(self.shape, device=self.device, dtype=torch.bfloat16, requires_grad=True)


def _shapes_are_known(stages: Any, has_backward: Any, p2p_done: Any) -> None:
    del has_backward, p2p_done
    for stage in stages:
        stage._inference_mode = _utils.InferenceMode.STATIC
