"""What a run's compiler and its switches make of a framework's kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from simpar.specs.framework_policies import Kernels
from simpar.specs.training import TrainingSpec


def library_of(own: Kernels, training: TrainingSpec, *, compiled: bool, tp: int, math_attention: bool) -> Kernels:
    """The kernels `own` of a framework as a run has them.

    Args:
        compiled: layers run as compiled graphs.
        tp: tensor ranks.
        math_attention: attention is that of torch's math backend.
    """
    here: dict[str, Any] = {
        "fused_activation": own.fused_activation or compiled or training.fuses("activation"),
        "fused_residual": own.fused_residual or compiled,
        "fused_norm": own.fused_norm or compiled or training.fuses("norm"),
        "fused_rope": own.fused_rope or compiled or training.fuses("rope"),
        "complex_rope": own.complex_rope and not training.fuses("rope"),
        # A graph over whole layers holds no split by tokens per expert on the host: biases go into the grouped kernels.
        "fused_expert_bias": own.fused_expert_bias or (training.cuda_graphs and training.cuda_graph_scope == "layer"),
        "fused_clamp": own.fused_clamp or compiled,
        # The backward of a norm in a graph reads all gradients of what it made.
        "linears_apart": () if compiled else own.linears_apart,
        "unfused_attention_fp32": own.unfused_attention_fp32 or math_attention,
        "saves_gathered_input": own.saves_gathered_input and tp > 1,
        "whole_embedding_gradient": own.whole_embedding_gradient and tp > 1,
    }
    # A search makes thousands of layouts, mostly of the library as it is; one object is found in memos at once.
    same = all(getattr(own, name) == value for name, value in here.items())
    return own if same else replace(own, **here)
