"""A family of config.json files: Llama with every second feed-forward left out."""

from simpar.model.decoder import Decoder
from simpar.model.families import READERS
from simpar.specs.mixers import BranchSpec


class Sparse(Decoder):
    def feed_forward(self, i: int) -> tuple[BranchSpec, ...]:
        return super().feed_forward(i) if i % 2 else ()


READERS["toy"] = Sparse
