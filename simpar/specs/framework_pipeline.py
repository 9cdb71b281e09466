"""The pipeline engine of a framework: a policy, see framework_policies.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from simpar.specs.framework_policies import Policy


@dataclass(frozen=True, slots=True)
class Pipeline(Policy):
    """The pipeline engine: what waits for a transfer, what a stage holds.

    Attributes:
        schedule: default without virtual stages.
        layer_rounding: how layers are spread over stages: "front" evenly, the extra ones to the first stages; "last" the same to
            the last; "fill" where they do not divide: every stage the rounded-up share, the last what is left; "cost" by compute
            cost with the head counted (layer_split.py); "ends" the rounded-up share in between, what is left on the first and
            last (with DualPipe on one rank).
        zero_stage_with_pp: the highest stage that its pipeline engine composes with.
        overlap_p2p_interleaved: with virtual stages sends are asynchronous; without, compute steps wait for batched sends and
            receives between them.
        overlap_p2p_zero_bubble: zero-bubble style runtimes post receives early.
        receives_block_host: the host waits for what another pipeline stage sends (it reads the shape first), so that it runs ahead
            of the device only where nothing is received: on the first stage's forwards in a row.
        tp_scatter_gather_p2p: pipeline sends are split over tensor ranks and gathered over NVLink at the far end (Megatron
            2021-2022 without sequence parallelism; sends shrink by tp).
        input_gradient_releases: a backward in two parts frees after the input gradient all but what weight gradients need (a store
            of matmul inputs and output gradients: zero-bubble's fork, DualPipe, Megatron); False: torch's pipelining keeps the
            whole graph until the weight gradient.
        keeps_stage_outputs: every stage output is held until its backward (DeepSpeed; Megatron before deallocate_pipeline_outputs).
        frees_stage_inputs: the input of a pipeline stage is given back after its forward, what its first norm saves of it too.
        last_outputs: micro-batches whose logits stay to the step's end: none, all (torch's pipelining), one (return_outputs=False).
        overlap_keeps_backward: where exchanges between expert ranks are hidden behind another micro-batch, all activations of the
            one whose backward runs stay until it has ended.
        receive_buffers_per_microbatch: every micro-batch has receive buffers of its own, made before the first (the same).
    """

    schedule: str = "1f1b"
    layer_rounding: Literal["front", "last", "fill", "cost", "ends"] = "front"
    zero_stage_with_pp: int = 3
    overlap_p2p_interleaved: bool = True
    overlap_p2p_zero_bubble: bool = True
    receives_block_host: bool = False
    tp_scatter_gather_p2p: bool = False
    input_gradient_releases: bool = True
    keeps_stage_outputs: bool = False
    frees_stage_inputs: bool = False
    last_outputs: Literal["none", "one", "all"] = "none"
    overlap_keeps_backward: bool = False
    receive_buffers_per_microbatch: bool = False
