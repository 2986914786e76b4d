"""Settings of a worker that is started by hand: what it is not told it takes as a plan for its GPU has them."""

from __future__ import annotations

from decimal import Decimal

from modelserve.engine_args import EngineArgs
from modelserve.hardware import Accelerator
from modelserve.model.architecture import ModelArchitecture
from modelserve.model.weight_format import WeightFormat
from modelserve.planning.evaluation import Fit, evaluate
from modelserve.planning.speed.expected_speed import mixed_step_tokens
from modelserve.planning.wishes import Wishes
from modelserve.sizing.media.audio_input import AudioInput
from modelserve.sizing.media.image_input import ImageInput
from modelserve.sizing.pages import KVCacheDtype, KVCacheLayout

STEP_SETTINGS = ("max_num_batched_tokens", "max_num_mixed_tokens", "max_num_seqs")


def planned_args(
    args: EngineArgs,
    architecture: ModelArchitecture,
    accelerator: Accelerator,
    *,
    weight_format: WeightFormat | None = None,
    images: ImageInput | None = None,
    audio: AudioInput | None = None,
) -> EngineArgs:
    """`args` with the sizes of a step that they leave out. As they are where a plan with the context that they ask for
    does not fit: the start says what is missing, from what it measures."""
    given = {name: getattr(args, name) for name in STEP_SETTINGS if name in args.model_fields_set}
    if len(given) == len(STEP_SETTINGS):
        return args
    wishes = Wishes(
        tensor_parallel=args.tensor_parallel_size,
        max_model_len=None if args.max_model_len == "auto" else args.max_model_len,
        min_model_len=args.min_model_len,
        kv_dtype=None if args.kv_cache_dtype == "auto" else KVCacheDtype(args.kv_cache_dtype),
        kv_layout=None if args.kv_cache_layout == "auto" else KVCacheLayout(args.kv_cache_layout),
        utilization=Decimal(str(args.gpu_memory_utilization)),
        weight_format=weight_format,
        images=images,
        audio=audio,
        image_architectures=(accelerator.architecture,),  # it runs
        **given,
    )
    fit = evaluate(wishes, architecture, accelerator, gpus=args.tensor_parallel_size)
    if not isinstance(fit, Fit) or fit.shortened or fit.downgraded:
        return args
    return args.model_copy(
        update={
            "max_num_batched_tokens": wishes.chunk(accelerator),
            "max_num_mixed_tokens": mixed_step_tokens(fit, architecture, wishes),
            "max_num_seqs": fit.sequences,
        }
    )
