"""The ledger of parameters against the weights of the workload's ops: two independent counts of every preset."""

from __future__ import annotations

import pytest
from parameter_ledger import mtp_parameters, parameters, total, total_parameters

from simpar.graph.kernels import KernelPlan, kernels
from simpar.model.network import simple_network, transformer_network
from simpar.specs.framework_policies import Kernels
from simpar.specs.model import TransformerSpec
from simpar.specs.models_io import load_model, table_names

SMALL = ("embedding/relative", "final/norm", "mtp.final_norm")
"""Terms that the ops may leave out: relative position biases, final norms of encoders and prediction modules."""


@pytest.mark.parametrize("name", table_names())
def test_ops_hold_the_parameters_of_the_ledger(name: str) -> None:
    model = load_model(name)
    if isinstance(model, TransformerSpec):
        network = transformer_network(model, 1, 16)
        left_out = sum(n for path, n in (*parameters(model), *mtp_parameters(model)) if path in SMALL)
    else:
        network, left_out = simple_network(model, 1, 1), 0
    ledger = total_parameters(model) + total(mtp_parameters(model))
    assert ledger - left_out <= network.parameters <= ledger


def test_biases_and_clamps_of_experts_are_kernels_of_their_own_unless_fused() -> None:
    plain = load_model("qwen3-30b-a3b")
    assert isinstance(plain, TransformerSpec)
    clamped = plain.model_copy(update={"mlp_bias": True, "swiglu_limit": 7.0})

    def expert_ops(model: TransformerSpec, *, fused: bool) -> dict[str, float]:
        layer = next(layer for layer in transformer_network(model, 1, 128).layers if layer.name == "moe_layer")
        found = kernels(layer, KernelPlan(Kernels(fused_expert_bias=fused)))
        return {k.node.name: sum(each for _, each in k.forward + k.backward) for k in found if k.node.name.startswith("moe/")}

    more = expert_ops(clamped, fused=False)
    assert expert_ops(clamped, fused=True).keys() == expert_ops(plain, fused=False).keys()
    assert {name: more[name] for name in more.keys() - expert_ops(plain, fused=False).keys()} == {
        "moe/clamp": 18,
        "moe/fc2_bias": 64,
    }
