"""What is trained on, how: sequence, batch, precision, optimizer."""

from __future__ import annotations

from typing import Annotated, Final, Literal, get_args

from pydantic import AfterValidator, Field

from simpar.specs.architecture import ModelSpec, TokenModel
from simpar.specs.base import Spec
from simpar.specs.model import Length, MoeSpec, Positive
from simpar.specs.optimizers import KINDS

BASE_BYTES: Final = {"int8": 1.0 + 4.0 / 4096.0, "nf4": 0.5 + 4.0 / 64.0, "nf4-double": 0.5 + 1.0 / 64.0 + 4.0 / (64.0 * 256.0)}
"""Bytes per quantised frozen weight with its scales: bitsandbytes' LLM.int8 has one fp32 scale per row (4,096 wide here), nf4 one
per 64 weights, which double quantisation turns into a byte and an fp32 per 256 of them (Dettmers et al. 2023, arXiv 2305.14314)."""

Precision = Literal["bf16", "fp16", "fp32", "tf32", "fp8", "fp8-rowwise", "fp8-block", "mxfp8", "nvfp4"]
HALVES: Final = ("bf16", "fp16")
"""Precisions of 16 bits, which autocast turns what it multiplies into."""
BELOW_16_BITS: Final = frozenset({"fp8", "fp8-rowwise", "fp8-block", "mxfp8", "nvfp4"})
"""Precisions below 16 bits."""
Part = Literal["linears", "experts"]
FusedKernel = Literal["norm", "rope", "activation"]


def _all_or_some(kernels: bool | tuple[FusedKernel, ...]) -> bool | tuple[FusedKernel, ...]:
    """All of them are true, none false."""
    if isinstance(kernels, bool):
        return kernels
    some = tuple(k for k in get_args(FusedKernel) if k in kernels)
    return some if 0 < len(some) < len(get_args(FusedKernel)) else bool(some)


FusedKernels = Annotated[bool | tuple[FusedKernel, ...], AfterValidator(_all_or_some)]


def _known_optimizer(name: str) -> str:
    if name not in KINDS:
        raise ValueError(f"must be one of {', '.join(KINDS)}")
    return name


Optimizer = Annotated[str, AfterValidator(_known_optimizer)]


class RoutingSpec(Spec):
    """How tokens spread over experts."""

    kind: Literal["balanced", "uniform", "lognormal", "zipf", "counts"] = "lognormal"
    """lognormal: a trained router's popularity of experts; balanced: every expert has the mean, as benchmarks force it; uniform:
    every expert is as likely, so chance alone spreads the tokens."""
    spread: Annotated[float, Field(ge=0, le=3)] | None = None
    """lognormal: standard deviation of the experts' loads over their mean. 0.05-0.1 under a bias that balances them, 0.2-0.9 of
    trained models, 1 early in training (docs/finetuning.md); none = by the router: `spread_of`."""
    alpha: Annotated[float, Field(ge=0)] = 0.0
    """Zipf exponent of the expert popularity."""
    counts: tuple[float, ...] = ()
    """Measured relative load per expert."""
    capacity_factor: Annotated[float, Field(gt=0)] | None = None
    """Fixed expert capacity (drop and pad) as a multiple of the mean; none = dropless."""
    in_turn: bool | None = None
    """balanced: experts are dealt in turn, so that those of a token are consecutive and lie on one rank or a few; false: at random.
    None = as the framework forces a balance."""

    def dealt_in_turn(self, usually: bool) -> bool:
        """Whether a forced balance gives each token consecutive experts, where the framework does so `usually` or not."""
        return self.kind == "balanced" and (usually if self.in_turn is None else self.in_turn)


BIASED_SPREAD: Final = 0.07
"""Under a bias per expert that balances loads (DeepSeek-V3): 0.05 to 0.1 (arXiv 2408.15664)."""
TRAINED_SPREAD: Final = (0.6, 32)
"""Of other routers, from so many experts on. Trained checkpoints on text: Ginis of 0.1 to 0.25 are 0.2 to 0.45, up to 2.35 times
that on random tokens (arXiv 2605.20982). In training: 0.9 where the load-balancing loss, about 1 + spread^2, is 1.87
(mlc-ai/pith-train issue 79); fullest ranks of 1.3 to 4.0 times the mean and a step 1.49 times a balanced one's (arXiv 2606.04101);
GPT-OSS, twice as fast once its ranks are even (arXiv 2601.17111). Runs of GPT-OSS and Qwen 3 put it between (`routing.spread` in
the registry). Coarse experts hold several fine ones, whose loads average: of 8 the fullest has 1.04 to 1.22 of the mean, 0.03 to
0.15, under an auxiliary loss (shawntan/scattermoe issue 10); from there to 32 it is taken to grow with their number."""


def spread_of(routing: RoutingSpec, model: TokenModel, moe: MoeSpec) -> float:
    """Standard deviation of the loads of `model`'s experts, `moe`, over their mean; by what the router is where nothing is said."""
    if routing.spread is not None:
        return routing.spread
    if balanced_by_bias(model, moe):
        return BIASED_SPREAD
    spread, experts = TRAINED_SPREAD
    return spread * min(moe.num_experts / experts, 1.0)


def balanced_by_bias(model: TokenModel, moe: MoeSpec) -> bool:
    """Whether a bias per expert keeps loads even: counted among the parameters, or a buffer beside them."""
    return model.even_routing or moe.router_bias


class EncoderInputSpec(Spec):
    """What each sample brings to an encoder beside the decoder."""

    per_sample: Annotated[int, Field(ge=0, le=100_000)] = 0
    """Images (or clips) of each sample; 0: the step is the decoder's on text alone."""
    tokens: Annotated[int, Field(gt=0, le=10_000_000)] | None = None
    """Tokens of one in the encoder, such as patches; none = the model's, where its inputs have one size."""
    frozen: Literal["none", "encoder", "all"] = "none"
    """What is not trained: nothing, the encoder's layers, or the projector to the decoder as well."""


class TrainingSpec(Spec):
    """One step's work."""

    sequence_length: Length = 1
    """Tokens per sequence (1 for models without a sequence)."""
    document_lengths: tuple[Annotated[int, Field(gt=0)], ...] = ()
    """Tokens of documents that are packed into sequences, a sample of their lengths: attention stays inside each of them, which a
    sequence's end cuts. Empty: a sequence is one document."""
    global_batch_size: Length
    """Sequences (samples) per step."""
    micro_batch_size: Positive = 1
    """Sequences per micro-batch and data-parallel rank."""
    precision: Precision = "bf16"
    """Of matrix products; fp8 and below name their scaling."""
    narrow_modules: Literal["all", "linears", "experts"] = "all"
    """Which products a precision below 16 bits holds for: all, those of linear layers without those of experts, or those of experts
    alone (torchtitan's quantize.linear and quantize.grouped_mm)."""
    fp8_gather: bool = True
    """Fully sharded weights of fp8 products with one scale a tensor are cast as shards and gathered in fp8 (torchao's
    enable_fsdp_float8_all_gather); False: in 16 bits, and cast where they are used."""
    optimizer: Optimizer = "adamw"
    """What each keeps: specs/optimizers.py. 8bit is bitsandbytes', 8bit-paged with its states in host memory, 4bit and fp8 are
    torchao's. adamw-fused and adamw-foreach are torch's where that is not how the framework calls it."""
    pure_bf16: bool | None = None
    """Trained weights, their gradients and the optimizer's states all rest in bf16 (in fp16 where that is `precision`), without an
    fp32 copy; none = the framework's way."""
    optimizer_in_backward: bool = False
    """Each weight is updated and its gradient dropped as soon as that is complete (one micro-batch, no global gradient norm)."""
    gradient_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Accumulation and reduction; none = the framework's default."""
    dropout: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Probability, in attention and after it and the MLP; none = what the model's file states where the framework runs the
    model's own code, else 0."""
    attention_kernel: Literal["auto", "unfused", "fa1", "fa2", "fa3", "fa4", "flex", "cudnn", "efficient"] = "auto"
    """auto = the framework's of that time on that GPU. efficient: torch's memory-efficient kernel under a mask that is a tensor,
    which scaled_dot_product_attention runs for a padded batch; it leaves no pair out."""
    cross_entropy: Literal["auto", "unfused", "half", "fused", "chunked", "linear", "tiled"] = "auto"
    """unfused: torch's on an fp32 copy of the logits; half: on 16-bit logits as they are (own loops without autocast); fused: one
    kernel that turns 16-bit logits into their gradient; chunked: by pieces of the sequence; linear: head and loss in one (Liger's
    fused linear cross-entropy), which never keeps logits; tiled: the same by tiles whose logits are computed again in the backward
    (TRL, prime-rl's RL, cut cross-entropy); auto: the framework's."""
    loss_parallel: bool | None = None
    """The loss runs over a vocabulary split over tensor ranks; false: each gathers the logits first (torchtitan's
    disable_loss_parallel, transformers' colwise_gather_output); none = as the framework does."""
    compile: bool | Literal["model", "loss"] | None = None
    """torch.compile, of the loss too where the framework compiles it, or of either alone; open: as the framework does."""
    fused_kernels: FusedKernels = False
    """Norm, rotary embedding and gated activation by a library's single kernels in a model of plain modules (Liger, Unsloth): true,
    or a list of those that are (norm, rope, activation)."""
    cuda_graphs: bool = False
    """Kernels are launched as graphs."""
    cuda_graph_scope: Literal["layer", "attention"] = "layer"
    """What graphs hold: whole layers, or all but experts and their dispatch."""
    collective_checks: bool = False
    """Before every collective its ranks compare on the host what each of them calls (TORCH_DISTRIBUTED_DEBUG=DETAIL)."""
    launch_blocking: bool = False
    """CUDA_LAUNCH_BLOCKING=1: the host waits for every kernel before it launches the next, so that its time adds to the device's
    and no kernel runs beside another of its rank."""
    routing: RoutingSpec = RoutingSpec()
    """How tokens spread over experts."""
    images: EncoderInputSpec = EncoderInputSpec()
    """For the vision encoder; the decoder's tokens of images are among sequence_length."""
    audio: EncoderInputSpec = EncoderInputSpec()
    """For the audio encoder, the same."""
    reference_model: bool | ModelSpec = False
    """A frozen model runs forward on every micro-batch before the trained one: true for a copy of it (the reference of preference
    optimisation; under low-rank adaptation its weights are the frozen ones that are there), or another model (a teacher), by the
    name of a preset, the path of a config.json, or a table."""
    trainable: Literal["all", "lora"] = "all"
    """What has gradients: everything or low-rank adapters."""
    lora_rank: Annotated[int, Field(gt=0)] = 16
    """Of the adapters."""
    lora_modules: Literal["attention", "qv", "mlp", "all"] = "attention"
    """Matmuls with a low-rank pair: the four of attention, those of queries and values alone (qv, peft's default; where one matmul
    makes keys too, that one), those of feed-forwards (mlp, experts included), or every one of a layer (the router not)."""
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Probability with which each pair drops an element of what it reads (0 is peft's default; scripts often set 0.05 or 0.1)."""
    dora: bool = False
    """Each output of an adapted matmul has a trained magnitude, divided by the norm of its adapted weights, taken in every forward
    (weight-decomposed adapters, peft's use_dora)."""
    lora_adapters: Annotated[int, Field(gt=0)] = 1
    """Adapters that are held and updated side by side; a token passes through one of them."""
    base_weights: Literal["auto", "fp32", "int8", "nf4", "nf4-double"] = "auto"
    """Format of a layer's frozen matrices; auto = 16 bits (fp8 in an fp8 run). nf4-double: its scales are quantised as well, as in
    QLoRA. fp32: all frozen weights as from_pretrained loaded them without a dtype before transformers 5, cast by autocast."""

    def narrow_in(self, part: Part) -> bool:
        """Whether a part's products are below 16 bits."""
        return self.precision in BELOW_16_BITS and self.narrow_modules in ("all", part)

    @property
    def gathers_fp8(self) -> bool:
        """Whether sharded weights with one scale a tensor are cast before they are gathered."""
        return self.precision == "fp8" and self.fp8_gather

    def fuses(self, kernel: FusedKernel) -> bool:
        """Whether a library makes one kernel of it."""
        return self.fused_kernels if isinstance(self.fused_kernels, bool) else kernel in self.fused_kernels
