"""A framework: Megatron-Core's with torchtitan's loss, and a host of its own."""

from simpar.specs.framework_releases import FrameworkRow as Row
from simpar.specs.framework_rows import FRAMEWORKS

FRAMEWORKS["toy"] = ({"": "megatron-core", "head": "torchtitan"}, (Row((2024, 1), {"launch_s": 1e-6}, "a toy"),))
