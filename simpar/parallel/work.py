"""Work of one rank: what a price is asked for. Every value is frozen and hashes, so equal work is priced once.

Named tuples are made and found in memos several times as fast as frozen dataclasses; no two kinds of work that share a memo have
as many fields of the same types, so that none is taken for another.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from simpar.hashed import HashedOnce
from simpar.specs.model import MoeSpec

Direction = Literal["forward", "dgrad", "wgrad"]
Implementation = Literal["tuned", "framework", "eager"]
Dimension = Literal["tp", "cp", "ep", "etp", "dp", "edp", "shard", "replica", "expert_shard", "expert_replica", "pp"]


class Gemm(NamedTuple):
    """y[m, n] = x[m, k] W[k, n] or one of its gradients, by the forward's m, n, k.

    Attributes:
        pieces: kernels that it is cut into along m, so that a collective overlaps with it.
        held_sms: SMs that the collective holds meanwhile.
    """

    m: int
    n: int
    k: int
    dtype: str = "bf16"
    direction: Direction = "forward"
    accumulate_fp32: bool = False
    pieces: int = 1
    held_sms: int = 0


class GroupedGemm(NamedTuple):
    """`tokens` rows over `groups` local experts, each k -> n."""

    groups: int
    tokens: float
    n: int
    k: int
    dtype: str = "bf16"
    direction: Direction = "forward"
    accumulate_fp32: bool = False


def operands(product: Gemm | GroupedGemm) -> dict[str, float]:
    """Elements of what a product multiplies and of the gradient of what it makes."""
    rows, matrices = (product.tokens, product.groups) if isinstance(product, GroupedGemm) else (float(product.m), 1)
    return {"input": rows * product.k, "weight": float(matrices) * product.n * product.k, "gradient": rows * product.n}


class AttentionWork(NamedTuple):
    """Scaled dot-product attention of one rank."""

    batch: int
    sequence_q: int
    sequence_kv: int
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    causal: bool = True
    backward: bool = False
    kernel: str = "auto"
    dtype: str = "bf16"
    window: int | None = None
    dropout: bool = False


class MemoryWork(NamedTuple):
    """A memory-bound kernel (or several of one class) moving `bytes_moved`."""

    kernel: str
    bytes_moved: float
    launches: int = 1
    implementation: Implementation = "tuned"


def fused(work: MemoryWork, activation: Implementation, *, backward: bool) -> MemoryWork:
    """A norm or a gate that is one kernel: its backward at a measured rate of its own, the gate by the kernel that it has. Of two
    products (torch's models, compiled) a gate is elementwise, as an activation without one. Chains of elementary kernels stay as
    they are: they move every byte at one rate in either direction."""
    if work.kernel == "norm" and backward:
        return MemoryWork("norm_backward", work.bytes_moved, work.launches, work.implementation)
    if work.kernel == "gate" and work.implementation != "tuned":
        return MemoryWork("activation", work.bytes_moved, work.launches, work.implementation)
    if work.kernel == "gate":
        return MemoryWork("gate_backward" if backward else "gate", work.bytes_moved, work.launches, activation)
    return work


class KernelWork(NamedTuple):
    """A scan in chunks, or a kernel of which only FLOPs and bytes are known; `flops` are the forward's for a scan."""

    kind: str
    flops: float
    bytes_moved: float
    launches: int
    backward: bool


class OptimizerWork(NamedTuple):
    """An optimizer step over `parameters` elements."""

    parameters: float
    bytes_per_parameter: float
    implementation: str = "fused"


class Collective(NamedTuple):
    """A collective over the group of `dimension`; `bytes` as nccl-tests counts them. `repeat` back-to-back calls, on average.

    A send along a pipeline names its `pair` of neighbours (`keys.pair_of`); -1 = the slowest of the group.
    """

    name: str
    bytes: float
    dimension: Dimension
    repeat: float = 1.0
    pair: int = -1


class ExpertExchange(NamedTuple):
    """Dispatch or combine of an expert layer: local tokens before dispatch, its experts, bytes per element."""

    combine: bool
    tokens: float
    hidden: int
    moe: MoeSpec
    element_bytes: float
    dispatcher: str

    @property
    def bytes(self) -> float:
        """Of all pairs of a token and an expert."""
        return self.tokens * self.moe.num_experts_per_tok * self.hidden * self.element_bytes


class HostCopy(NamedTuple):
    """Bytes over the host link of one GPU."""

    bytes: float


Work = Gemm | GroupedGemm | AttentionWork | MemoryWork | KernelWork | OptimizerWork | Collective | ExpertExchange | HostCopy


class LocalOp(NamedTuple):
    """One op of one rank inside a block.

    Attributes:
        name: path, "attention/qkv.dgrad".
        stream: "compute" or the dimension whose communication stream it uses.
        work: what it costs.
        deps: indices, in the block's list, of the ops it waits for besides its stream.
        kernels: launches it makes; of a collective 0 where it is a part of one that was issued before.
    """

    name: str
    stream: str
    work: Work
    deps: tuple[int, ...]
    kernels: int = 1


class OpList:
    """Builds a block's op list: compute ops chain, collectives hang off them, `wait` joins."""

    def __init__(self) -> None:
        self.ops: list[LocalOp] = []
        self._pending: tuple[int, ...] = ()
        """What the next compute op waits for, besides the stream."""
        self._beside: list[tuple[str, Work, str]] = []
        """What runs beside the next product."""

    def _last_compute(self) -> tuple[int, ...]:
        for index in range(len(self.ops) - 1, -1, -1):
            if self.ops[index].stream == "compute":
                return (index,)
        return ()

    def compute(self, name: str, work: Work, kernels: int = 1) -> int:
        """A compute op after everything waited for."""
        late: tuple[int, ...] = ()
        if isinstance(work, Gemm | GroupedGemm):
            late, self._beside = tuple(self.start(*rest, kernels=0) for rest in self._beside), []
        self.ops.append(LocalOp(name, "compute", work, self._pending, kernels))
        self._pending = late
        return len(self.ops) - 1

    def start(self, name: str, work: Work, stream: str, *, kernels: int = 1) -> int:
        """A communication op that may start when the ops issued so far on the compute stream have finished."""
        self.ops.append(LocalOp(name, stream, work, tuple({*self._last_compute(), *self._pending}), kernels))
        return len(self.ops) - 1

    def wait(self, *indices: int) -> None:
        """The next compute op waits for these."""
        self._pending = tuple(sorted({*self._pending, *indices}))

    def beside(self, name: str, work: Work, stream: str) -> None:
        """The rest of a collective in chunks: it runs beside the next product, and what comes after that waits for it."""
        self._beside.append((name, work, stream))

    def blocking(self, name: str, work: Work, stream: str) -> int:
        """A communication op that the next compute op waits for."""
        index = self.start(name, work, stream)
        self.wait(index)
        return index

    def done(self) -> tuple[LocalOp, ...]:
        """The finished list."""
        return HashedOnce(self.ops)
