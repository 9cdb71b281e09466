"""A mixer: one matrix from the hidden size to a width and one back."""

from typing import Literal

from simpar.model.writer import Writer
from simpar.specs.mixers import OTHER_MIXERS, Mixer


class Bottleneck(Mixer):
    kind: Literal["toy"] = "toy"
    width: int

    def write(self, writer: Writer, x: str) -> list[str]:
        narrow = writer.axis("bottleneck", self.width, "tensor")
        y = writer.linear("toy/down", x, narrow, "toy")
        return [writer.linear("toy/up", y, "batch sequence hidden", "toy")]


OTHER_MIXERS["toy"] = Bottleneck
