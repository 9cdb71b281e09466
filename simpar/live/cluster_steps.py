"""Real training steps of one layout on one rank: model, sharding, pipeline, optimizer."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from simpar.live.autograd_collectives import Group, all_reduce
from simpar.live.cluster_attention import positions
from simpar.live.cluster_layouts import HAS_CLASS, RunLayout
from simpar.live.cluster_measure import Busy
from simpar.live.cluster_model import Groups, Mlp, Transformer, token_loss

if TYPE_CHECKING:
    from simpar.live.cluster_world import World

BETWEEN = ("norm.weight", "feed_forward.router")
"""Names of weights that sequence parallelism leaves a part of the sequence to see."""


def _wrapped(module: Any, layout: RunLayout) -> Any:
    """Layers under checkpointing, or compiled, as the layout says."""
    for index, layer in enumerate(module.layers):
        if layout.recompute:
            module.layers[index] = checkpoint_wrapper(layer, preserve_rng_state=False)
        if layout.compiled:
            module.layers[index].compile()
    return module


class Step:
    """One training step of a layout, callable; returns this rank's mean loss, None where it has none."""

    def __init__(self, world: World, layout: RunLayout) -> None:
        self.world, self.layout, config = world, layout, world.config
        self.shape, training = config["models"][layout.model], config["training"][layout.model]
        self.micro, self.sequence = training["micro_batch_size"], training["sequence_length"]
        self.microbatches = training["global_batch_size"] // (self.micro * layout.dp)
        self.groups = Groups(
            world.group(layout.groups("tp")), world.group(layout.groups("cp")),
            world.group(layout.expert_groups(replicas=False)), layout.sequence_parallel, layout.cp_style,
            config.get("precision", "fp32"),
        )  # fmt: skip
        self.data = world.group(layout.groups("cp", "dp"))
        self.replicas = world.group(layout.expert_groups(replicas=True))
        self.everyone = world.group([tuple(range(layout.world_size))])
        self.mesh: Any = None
        self.at = layout.coordinates(world.rank if layout.world_size > 1 else 0)
        self.busy: Busy | None = None
        self.held: list[Any] = []
        self.pipeline = Busy(world.device)
        if layout.fsdp:
            self.groups = replace(self.groups, shard=self._shard)
        self.modules = self._modules()
        self.wrapped: Any = self._wrap() if layout.pp == 1 else None
        self.schedule: Any = self._schedule() if layout.pp > 1 else None
        parameters = [p for m in self.modules for p in m.parameters()]
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)
        self.inputs, self.targets = self._data()

    # -- building --------------------------------------------------------------------------------------------------

    def stages(self) -> list[int]:
        """Virtual stages of this rank."""
        layout, p = self.layout, self.at["pp"]
        if self.v_shaped:
            return [p, 2 * layout.pp - 1 - p]
        return [p + layout.pp * c for c in range(layout.virtual_stages)]

    @property
    def v_shaped(self) -> bool:
        """The second half of the model comes back over the ranks."""
        return self.layout.schedule in ("zb-v", "v-half", "v-min", "dualpipe-v")

    def layers(self, stage: int) -> range:
        """Layers of a stage, as the configuration splits them."""
        count = self.shape["depth"] if self.layout.model == "mlp" else self.shape["num_hidden_layers"]
        split = self.world.config["stage_layers"].get(self.layout.name) or [count]
        first = sum(split[:stage])
        return range(first, first + split[stage])

    def _modules(self) -> list[Any]:
        count, found = self.layout.stages, []
        with torch.device(self.world.device):
            for stage in self.stages():
                if self.layout.model == "mlp":
                    module: Any = Mlp(self.shape, self.groups, self.layers(stage))
                else:
                    where = positions(self.sequence, self.groups.cp, self.layout.cp_style)
                    ends = {"first": stage == 0, "last": stage == count - 1}
                    module = Transformer(self.shape, self.groups, where, self.layers(stage), **ends)
                found.append(_wrapped(module, self.layout))
        return found

    def _wrap(self) -> Any:
        layout, model = self.layout, self.modules[0]
        if layout.fsdp:
            return self._sharded(model)
        if self.data.size > 1 and not layout.folds_experts:
            from torch.nn.parallel import DistributedDataParallel

            # Positions differ between context-parallel ranks: buffers stay each rank's own.
            options = {"gradient_as_bucket_view": True, "broadcast_buffers": False}
            return DistributedDataParallel(model, process_group=self.data.handle, **options)
        return model

    def _shard(self, part: Any) -> Any:
        """A layer, the embedding or the head fully sharded as soon as it is made; in a pipeline it stays gathered in the step."""
        return fully_shard(part, **self._sharding())

    def _sharding(self) -> dict[str, Any]:
        if self.mesh is None:
            self.mesh = DeviceMesh.from_group(self.data.handle or self.world.alone(), self.world.device.type)
        found: dict[str, Any] = {"mesh": self.mesh, "reshard_after_forward": self.layout.pp == 1}
        if self.groups.precision != "fp32":
            found["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        return found

    def _sharded(self, model: Any) -> Any:
        """The model around its sharded parts. The backward begins with the last of them: it stays gathered."""
        last = [part for part in (model.embedding, *model.layers, model.head) if part is not None][-1]
        last.set_reshard_after_forward(False)
        return fully_shard(model, **self._sharding())

    def _schedule(self) -> Any:
        from torch.distributed.pipelining import PipelineStage, schedules

        group, layout = self.world.group(self.layout.groups("pp")), self.layout
        own = self.stages()
        if layout.fsdp:
            self.modules = [self._sharded(m) for m in self.modules]
        stages = [
            PipelineStage(m, s, layout.stages, self.world.device, group=group.handle)
            for m, s in zip(self.modules, own, strict=True)
        ]
        self.busy, self.held = Busy(self.world.device), stages
        for stage in stages:
            self.busy.wrap(stage, "forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")
        text = self.world.config["schedules"].get(layout.name)
        options = {"loss_fn": self._loss, "scale_grads": False}
        if text is None and layout.schedule in HAS_CLASS:
            kind = getattr(schedules, HAS_CLASS[layout.schedule])
            built = kind(stages if issubclass(kind, schedules.PipelineScheduleMulti) else stages[0], self.microbatches, **options)
        else:
            built = schedules._PipelineScheduleRuntime(stages, self.microbatches, **options)
            with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
                file.write(text or "")
                file.flush()
                built._load_csv(file.name, "compute_only")
        self.busy.wrap(built, "_maybe_compute_loss")
        return built

    def _data(self) -> tuple[Any, Any]:
        """This rank's inputs and targets of one step, the same for all layouts taken together; none where a stage reads none."""
        layout, device = self.layout, self.world.device
        whole = self.microbatches * self.micro * layout.dp
        generator = torch.Generator().manual_seed(0)
        if layout.model == "mlp":
            inputs = torch.randn(whole, self.shape["width"], generator=generator)
            targets = torch.randint(0, self.shape["width"], (whole,), generator=generator)
        else:
            tokens = torch.randint(0, self.shape["vocab_size"], (whole, self.sequence + 1), generator=generator)
            where = positions(self.sequence, self.groups.cp, layout.cp_style)
            inputs, targets = tokens[:, where], tokens[:, where + 1]
        part = slice(self.at["dp"] * whole // layout.dp, (self.at["dp"] + 1) * whole // layout.dp)
        own = self.stages()
        held = (inputs if 0 in own else None), (targets if layout.stages - 1 in own else None)
        inputs, targets = (None if t is None else t[part].clone().to(device) for t in held)
        return inputs, targets

    def _loss(self, output: Any, target: Any) -> Any:
        if self.layout.model == "mlp":
            return torch.nn.functional.cross_entropy(output, target) / self.microbatches
        return token_loss(output, target, self.groups) / self.microbatches

    def tensors(self) -> list[Any]:
        """Parameters, buffers, gradients, optimizer states, inputs of this rank and what its pipeline receives into."""
        own = [t for m in self.modules for t in (*m.parameters(), *m.buffers())]
        own += [p.grad for m in self.modules for p in m.parameters() if p.grad is not None]
        states = [v for state in self.optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
        infos = [i for s in self.held for known in (s.args_recv_info, s.grad_recv_info) for each in known.values() for i in each]
        received = [b for b in (getattr(i, "buffer", None) for i in infos) if isinstance(b, torch.Tensor)]
        return [*own, *states, *received, *(t for t in (self.inputs, self.targets) if t is not None)]

    # -- running ---------------------------------------------------------------------------------------------------

    def __call__(self) -> Any:
        with self.pipeline.running():
            loss = self._pipeline() if self.schedule else self._accumulate()
        self._sync()
        self._norm()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        return loss

    def _accumulate(self) -> Any:
        total: Any = 0.0
        inputs, targets = self.inputs.split(self.micro), self.targets.split(self.micro)
        for index, (x, y) in enumerate(zip(inputs, targets, strict=True)):
            later = index < self.microbatches - 1 and hasattr(self.wrapped, "no_sync")
            with self.wrapped.no_sync() if later else nullcontext():
                loss = self._loss(self.wrapped(x), y)
                loss.backward()
            total = total + loss.detach()
        return total

    def _pipeline(self) -> Any:
        own = self.stages()
        losses: list[Any] = []
        arguments = (self.inputs,) if 0 in own else ()
        last = {"target": self.targets, "losses": losses} if self.layout.stages - 1 in own else {}
        self.schedule.step(*arguments, return_outputs=False, **last)
        return torch.stack([v.detach() for v in losses]).sum() if last else None

    def _sync(self) -> None:
        """Gradients that no wrapper reduces: flat, dense weights then experts, a stage at a time."""
        if self.layout.sequence_parallel:
            # Weights between the tensor-parallel parts saw only this rank's part of the sequence.
            for module in self.modules:
                self._sum([p for n, p in module.named_parameters() if n.endswith(BETWEEN) and p.grad is not None])
        folded = self.layout.folds_experts
        if self.layout.fsdp or (self.data.size == 1 and not folded) or (self.layout.pp == 1 and not folded):
            return
        for module in self.modules:
            named = [(n, p) for n, p in module.named_parameters() if p.grad is not None]
            experts = [p for n, p in named if folded and n.endswith(("feed_forward.fc1", "feed_forward.fc2"))]
            dense = [p for _, p in named if not any(p is e for e in experts)]
            self._average(dense, self.data)
            self._average(experts, self.replicas)

    def _sum(self, parameters: list[Any]) -> None:
        local = [getattr(p.grad, "_local_tensor", p.grad) for p in parameters]
        flat = all_reduce(torch.cat([g.flatten() for g in local]), self.groups.tp)
        for g, part in zip(local, flat.split([g.numel() for g in local]), strict=True):
            g.copy_(part.view_as(g))

    def _average(self, parameters: list[Any], group: Group) -> None:
        scale = 1.0 / self.data.size
        if not parameters:
            return
        if group.size == 1:
            torch._foreach_mul_([p.grad for p in parameters], scale)
            return
        flat = all_reduce(torch.cat([p.grad.flatten() for p in parameters]), group).mul_(scale)
        for p, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            p.grad.copy_(part.view_as(p.grad))

    def _norm(self) -> Any:
        """The global gradient norm: one value over all ranks, read by the host where frameworks log it."""
        grads = [getattr(p.grad, "_local_tensor", p.grad) for m in self.modules for p in m.parameters() if p.grad is not None]
        own = torch.stack(torch._foreach_norm(grads)).square().sum()
        if self.everyone.size > 1:
            all_reduce(own, self.everyone)
        return float(own.sqrt())
