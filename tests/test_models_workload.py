"""The ledger of parameters against the weights of the workload's ops: two independent counts of every preset."""

from __future__ import annotations

import pytest

from simpar.specs.model import TransformerSpec
from simpar.specs.models_io import load_model, model_names
from simpar.workload.network import simple_network, transformer_network
from simpar.workload.parameters import mtp_parameters, parameters, total, total_parameters
from simpar.workload.style import BlockStyle

SMALL = ("embedding/relative", "final/norm", "mtp.final_norm")
"""Terms that the ops may leave out: relative position biases, final norms of encoders and prediction modules."""


@pytest.mark.parametrize("name", model_names())
def test_ops_hold_the_parameters_of_the_ledger(name: str) -> None:
    model = load_model(name)
    if isinstance(model, TransformerSpec):
        network = transformer_network(model, 1, 16, BlockStyle())
        left_out = sum(n for path, n in (*parameters(model), *mtp_parameters(model)) if path in SMALL)
    else:
        network, left_out = simple_network(model, 1, 4.0, 1), 0
    ledger = total_parameters(model) + total(mtp_parameters(model))
    assert ledger - left_out <= network.parameters <= ledger
