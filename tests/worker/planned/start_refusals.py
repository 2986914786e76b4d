"""Every refusal that a worker's start can make, and why none of a chosen plan meets it.

A row is of the `raise` statements of one exception in one function (`reachable_raises` finds them). A refusal that a
planner can know of is prevented by a rule of the planner or of the schema, which the row names; of another the row says
why nobody can know of it before the worker runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import get_args

from modelserve.api.status import LimitedBy


class Unknowable(Enum):
    """Why a refusal may meet a worker of a chosen plan all the same, or cannot meet any."""

    FILES = "files of a checkpoint that are missing, damaged or changed since they were inspected"
    MACHINE = "a device, driver, library or image that is not what the cluster says"
    BY_HAND = "flags and settings that no plan writes: of a worker that somebody starts by hand"
    REQUEST = "of one request, once the worker serves"
    ADAPTER = "of one adapter, once the worker serves"
    CONTRACT = "what the engine promises itself; a fault of its code, whatever the plan"
    ECHO = "hands on what another row raises"


@dataclass(frozen=True)
class Rule:
    """What refuses a plan, or a spec, before: MODULE:NAME, with the candidates' `limitedBy` where it is the planner."""

    where: str
    limited_by: LimitedBy | None = None

    def __post_init__(self) -> None:
        assert self.limited_by is None or self.limited_by in get_args(LimitedBy)


Why = Unknowable | Rule

_FILES, _MACHINE, _HAND, _REQUEST = Unknowable.FILES, Unknowable.MACHINE, Unknowable.BY_HAND, Unknowable.REQUEST
_ADAPTER, _CONTRACT, _ECHO = Unknowable.ADAPTER, Unknowable.CONTRACT, Unknowable.ECHO
# The inspection of a model runs the same functions before anything is planned: what they refuse has no plan.
_INSPECTED = Rule("modelserve.inspection:inspect_checkpoint")
_PAIR = Rule("modelserve.planning.drafts:WantedDrafts.of_target")
_TENSOR = Rule("modelserve.sizing.weights.text:tensor_parallel_problem", "TensorParallel")
_GENERATION = Rule("modelserve.sizing.backends.generations:generation_of", "ComputeCapability")
_LAYOUT = Rule("modelserve.planning.evaluation:_unservable", "Layout")
_CONTEXT = Rule("modelserve.planning.evaluation:_unservable", "ContextLength")
_FORMATS = Rule("modelserve.planning.evaluation:_unservable", "ComputeCapability")
_MEMORY = Rule("modelserve.planning.evaluation:evaluate", "Memory")
_CPUS = Rule("modelserve.planning.evaluation:architecture_problem", "Architecture")
_IMAGES = Rule("modelserve.planning.media.images:image_input")
_AUDIO = Rule("modelserve.planning.media.audio:audio_input")
_IMAGE_SPEC = Rule("modelserve.api.media.modalities:ImageSpec")
_ADAPTERS = Rule("modelserve.api.model_adapter:AdaptersSpec")
_ENGINE_RULES = Rule("modelserve.api.spec:EngineSpec")

_CORE, _WORKER = "modelserve.", "modelserve_worker."
START_REFUSALS: dict[tuple[str, str], tuple[int, Why]] = {
    # (function, exception): (statements, why)
    (_CORE + "model.architecture:ModelArchitecture._consistent", "ValueError"): (7, _INSPECTED),
    (_CORE + "model.architecture:ModelArchitecture.from_config", "InvalidInput"): (5, _INSPECTED),
    (_CORE + "model.architecture:ModelArchitecture.from_config", "UnsupportedModel"): (1, _INSPECTED),
    (_CORE + "model.architecture:_global_overrides", "ValueError"): (1, _INSPECTED),
    (_CORE + "model.architecture:architecture_fields", "UnsupportedModel"): (1, _INSPECTED),
    (_CORE + "model.architecture:architecture_fields", "ValueError"): (2, _INSPECTED),
    # An assistant of a plan is left out where it would not start (`optional_drafter`).
    (_CORE + "model.assistant:AssistantArchitecture._consistent", "ValueError"): (3, _FILES),
    (_CORE + "model.drafter_config:faults_of_a_config", "InvalidInput"): (3, _FILES),
    (_CORE + "model.assistant:AssistantArchitecture.from_config", "UnsupportedModel"): (3, _FILES),
    (_CORE + "model.drafters.configs:_count", "ValueError"): (1, _FILES),
    (_CORE + "model.drafters.configs:_layer_types", "ValueError"): (1, _FILES),
    (_CORE + "model.drafters.configs:_layers", "KeyError"): (1, _FILES),
    (_CORE + "model.drafters.configs:_numbers", "ValueError"): (2, _FILES),
    (_CORE + "model.drafters.configs:_serve", "UnsupportedModel"): (1, _FILES),
    (_CORE + "model.drafters.configs:_speculators", "UnsupportedModel"): (1, _FILES),
    (_CORE + "model.drafters.configs:_speculators", "ValueError"): (2, _FILES),
    (_CORE + "model.drafters.configs:_windows", "ValueError"): (1, _FILES),
    (_CORE + "model.drafters.configs:_zlab", "ValueError"): (2, _FILES),
    (_CORE + "model.drafters.configs:_zlab.required", "KeyError"): (1, _FILES),
    (_CORE + "model.drafters.configs:dflash_architecture", "UnsupportedModel"): (1, _FILES),
    (_CORE + "model.drafters.dflash:DFlashArchitecture._check_conv_and_selector", "ValueError"): (5, _FILES),
    (_CORE + "model.drafters.dflash:DFlashArchitecture._consistent", "ValueError"): (11, _FILES),
    (_CORE + "model.drafters.reading:drafter_architecture", "InvalidInput"): (1, _FILES),
    (_CORE + "model.drafters.reading:drafter_architecture", "UnsupportedModel"): (2, _FILES),
    (_CORE + "model.checkpoint_files:_entry", "InvalidInput"): (3, _FILES),
    (_CORE + "model.checkpoint_files:read_header", "InvalidInput"): (5, _FILES),
    (_CORE + "model.checkpoint_files:read_index", "InvalidInput"): (2, _FILES),
    (_CORE + "model.checkpoint_files:read_json_object", "InvalidInput"): (4, _FILES),
    (_CORE + "model.checkpoint_files:weight_files", "InvalidInput"): (2, _FILES),
    # Of a plan: the directories of two addresses, of which one is an assistant.
    (_CORE + "engine_args:EngineArgs._directories", "ValueError"): (2, Rule("modelserve.api.drafter:DrafterSpec")),
    (_CORE + "engine_args:EngineArgs._one_choice", "ValueError"): (1, Rule("modelserve.api.drafter:DrafterSpec")),
    (_CORE + "inspection:read_drafters", "InvalidInput"): (1, Rule("modelserve.api.drafter:DrafterSpec")),
    (_CORE + "engine_args:EngineArgs._names", "ValueError"): (1, Rule("modelserve.api.model_source:ModelSource")),
    (_CORE + "engine_args:EngineArgs._adaptable", "ValueError"): (1, _ADAPTERS),
    (_CORE + "engine_args:EngineArgs._holds_slots", "ValueError"): (1, _ADAPTERS),
    (_CORE + "model.images:trained_budget", "ValueError"): (1, _IMAGE_SPEC),
    (_CORE + "engine_args:EngineArgs._hosts", "ValueError"): (1, _IMAGE_SPEC),
    (_CORE + "sizing.media.image_urls:UrlHost.parse", "ValueError"): (1, _IMAGE_SPEC),
    (_CORE + "sizing.media.image_urls:url_hosts", "ValueError"): (1, _IMAGE_SPEC),
    # What an image's address leads to: by the names of the functions, not by who calls them.
    (_WORKER + "media.fetching.exchange:_location", "MediaFetchFailed"): (1, _REQUEST),
    (_WORKER + "media.fetching.exchange:_require_image", "MediaFetchFailed"): (2, _REQUEST),
    (_WORKER + "media.fetching.exchange:_require_image", "_too_large"): (1, _REQUEST),
    (_WORKER + "media.fetching.exchange:get", "MediaFetchFailed"): (2, _REQUEST),
    (_WORKER + "media.fetching.exchange:get", "_too_large"): (1, _REQUEST),
    (_WORKER + "media.fetching.image_fetcher:ImageFetcher._connected", "MediaFetchFailed"): (1, _REQUEST),
    (_WORKER + "media.fetching.image_fetcher:ImageFetcher._connected", "MediaUrlRefused"): (1, _REQUEST),
    (_WORKER + "media.fetching.image_fetcher:ImageFetcher._connected", "again"): (1, _REQUEST),
    (_WORKER + "media.fetching.image_fetcher:ImageFetcher._connected", "failed"): (1, _REQUEST),
    (_WORKER + "media.fetching.image_fetcher:ImageFetcher.fetch", "MediaFetchFailed"): (5, _REQUEST),
    (_WORKER + "media.fetching.place:place_of", "MediaUrlRefused"): (6, _REQUEST),
    (_CORE + "inspection:read_images", "InvalidInput"): (1, _IMAGES),
    (_CORE + "inspection:read_images", "UnsupportedModel"): (1, _IMAGES),
    (_CORE + "model.images:ImageArchitecture.from_config", "InvalidInput"): (2, _IMAGES),
    (_CORE + "model.images:ImageArchitecture.from_config", "UnsupportedModel"): (2, _IMAGES),
    (_CORE + "model.images:ImageArchitecture._consistent", "ValueError"): (1, _IMAGES),
    (_CORE + "model.images:_unified", "UnsupportedModel"): (1, _IMAGES),
    (_CORE + "model.image_tower:TowerArchitecture.from_vision_config", "UnsupportedModel"): (1, _IMAGES),
    (_CORE + "inspection:read_audio", "InvalidInput"): (1, _AUDIO),
    (_CORE + "inspection:read_audio", "UnsupportedModel"): (1, _AUDIO),
    (_CORE + "model.audio:AudioArchitecture.from_config", "InvalidInput"): (2, _AUDIO),
    (_CORE + "model.audio:AudioArchitecture.from_config", "UnsupportedModel"): (2, _AUDIO),
    (_CORE + "model.audio_tower:AudioTowerArchitecture._consistent", "ValueError"): (3, _AUDIO),
    (_CORE + "model.audio_tower:AudioTowerArchitecture.from_audio_config", "UnsupportedModel"): (1, _AUDIO),
    (
        _WORKER + "__main__:_told",
        "TerminalError.of_input if of_input else TerminalError.of_checkpoint",
    ): (1, _ECHO),
    # Files of adapters: a worker reads them once it serves.
    (_CORE + "model.adapters.binding:_bind", "UnsupportedModel"): (5, _ADAPTER),
    (_CORE + "model.adapters.binding:_bind_stacked", "UnsupportedModel"): (1, _ADAPTER),
    (_CORE + "model.adapters.binding:_claim", "UnsupportedModel"): (1, _ADAPTER),
    (_CORE + "model.adapters.binding:bind", "UnsupportedModel"): (2, _ADAPTER),
    (_CORE + "model.adapters.binding:read_adapter", "InvalidInput"): (1, _ADAPTER),
    (_CORE + "model.adapters.config:AdapterConfig.from_document", "InvalidInput"): (1, _ADAPTER),
    (_CORE + "model.adapters.config:AdapterConfig.from_document", "UnsupportedModel"): (4, _ADAPTER),
    (_CORE + "model.adapters.config:_check", "UnsupportedModel"): (1, _ADAPTER),
    (_CORE + "model.adapters.names:factor_name", "UnsupportedModel"): (5, _ADAPTER),
    (_WORKER + "adapters.reading:_read", "InvalidInput"): (2, _ADAPTER),
    (_WORKER + "adapters.reading:check_fits", "UnsupportedModel"): (1, _ADAPTER),
    (_WORKER + "adapters.reading:read_into_host", "InvalidInput"): (1, _ADAPTER),
    (_CORE + "model.gguf.files:_read", "InvalidInput"): (4, _INSPECTED),
    (_CORE + "model.gguf.files:gguf_files", "InvalidInput"): (1, _INSPECTED),
    (_CORE + "model.gguf.files:whole", "InvalidInput"): (1, _INSPECTED),
    (_CORE + "model.gguf.geometry:_Keys.by_layer", "self._missing"): (1, _INSPECTED),
    (_CORE + "model.gguf.geometry:_Keys.by_layer", "self.fault"): (1, _INSPECTED),
    (_CORE + "model.gguf.geometry:_Keys.check", "UnsupportedModel"): (1, _INSPECTED),
    (_CORE + "model.gguf.geometry:_Keys.count", "self._missing"): (1, _INSPECTED),
    (_CORE + "model.gguf.geometry:_Keys.matrix", "InvalidInput"): (1, _INSPECTED),
    (_CORE + "model.gguf.geometry:_Keys.number", "self._missing"): (1, _INSPECTED),
    (_CORE + "model.gguf.geometry:_Keys.same", "UnsupportedModel"): (1, _INSPECTED),
    (_CORE + "model.gguf.geometry:_eos", "InvalidInput"): (1, _INSPECTED),
    (_CORE + "model.gguf.geometry:_fields", "InvalidInput"): (2, _INSPECTED),
    (_CORE + "model.gguf.geometry:_keys_are_values", "InvalidInput"): (1, _INSPECTED),
    (_CORE + "model.gguf.geometry:_rotated", "InvalidInput"): (2, _INSPECTED),
    (_CORE + "model.gguf.geometry:_rotated", "UnsupportedModel"): (1, _INSPECTED),
    (_CORE + "model.gguf.geometry:_widths", "UnsupportedModel"): (1, _INSPECTED),
    (_CORE + "model.gguf.geometry:gguf_architecture", "InvalidInput"): (1, _INSPECTED),
    (_CORE + "model.gguf.geometry:gguf_architecture", "UnsupportedModel"): (1, _INSPECTED),
    (_CORE + "model.gguf.header:_Cursor.check", "InvalidInput"): (2, _INSPECTED),
    (_CORE + "model.gguf.header:_Cursor.count", "InvalidInput"): (1, _INSPECTED),
    (_CORE + "model.gguf.header:_Cursor.take", "InvalidInput"): (1, _INSPECTED),
    (_CORE + "model.gguf.header:_Cursor.text", "InvalidInput"): (2, _INSPECTED),
    (_CORE + "model.gguf.header:_array", "InvalidInput"): (1, _INSPECTED),
    (_CORE + "model.gguf.header:_placed", "InvalidInput"): (3, _INSPECTED),
    (_CORE + "model.gguf.header:_tensor", "InvalidInput"): (4, _INSPECTED),
    (_CORE + "model.gguf.header:_value", "InvalidInput"): (1, _INSPECTED),
    (_CORE + "model.gguf.header:read_gguf_header", "InvalidInput"): (4, _INSPECTED),
    (_CORE + "model.gguf.header:read_numbers", "InvalidInput"): (1, _FILES),
    (_CORE + "model.gguf.weight_format:_check_others", "UnsupportedModel"): (1, _INSPECTED),
    (_CORE + "model.gguf.weight_format:_format", "InvalidInput"): (1, _INSPECTED),
    (_CORE + "model.gguf.weight_format:_format", "UnsupportedModel"): (2, _INSPECTED),
    (_CORE + "model.quantization.auto_round:_format", "unknown"): (1, _INSPECTED),
    (_CORE + "model.quantization.auto_round:format_of_modules", "unknown"): (2, _INSPECTED),
    (_CORE + "model.quantization.awq:format_of_modules", "unknown"): (1, _INSPECTED),
    (_CORE + "model.quantization.block_fp8:format_of_modules", "unknown"): (1, _INSPECTED),
    (_CORE + "model.quantization.compressed_tensors:_activations", "unknown"): (1, _INSPECTED),
    (_CORE + "model.quantization.compressed_tensors:_scheme_format", "unknown"): (3, _INSPECTED),
    (_CORE + "model.quantization.compressed_tensors:format_of_modules", "unknown"): (3, _INSPECTED),
    (_CORE + "model.quantization.config:_format_of_modules", "unknown"): (1, _INSPECTED),
    (_CORE + "model.quantization.files:_held", "unknown"): (1, _INSPECTED),
    (_CORE + "model.quantization.gptq:_rules", "unknown"): (2, _INSPECTED),
    (_CORE + "model.quantization.gptq:format_of_modules", "unknown"): (1, _INSPECTED),
    (_CORE + "model.quantization.gptq:packed_format", "unknown"): (1, _INSPECTED),
    (_CORE + "model.quantization.linears:_check_unquantised", "unknown"): (1, _INSPECTED),
    (_CORE + "model.quantization.linears:checked", "unknown"): (1, _INSPECTED),
    (_CORE + "model.quantization.linears:of_linears", "unknown"): (2, _INSPECTED),
    (_CORE + "model.quantization.linears:of_modules", "_differing"): (1, _INSPECTED),
    (_CORE + "model.quantization.modelopt:_format", "unknown"): (1, _INSPECTED),
    (_CORE + "model.quantization.modelopt:format_of_modules", "unknown"): (1, _INSPECTED),
    (_CORE + "model.quantization.patterns:expression", "unknown"): (1, _INSPECTED),
    (_CORE + "model.quantization.patterns:listed", "unknown"): (1, _INSPECTED),
    (_CORE + "model.weight_format:MatrixFormat._consistent", "ValueError"): (4, _INSPECTED),
    (_CORE + "model.weight_format:WeightFormat._each_once", "ValueError"): (2, _INSPECTED),
    (_CORE + "sizing.backends.generations:generation_of", "UnknownGenerationError"): (1, _GENERATION),
    (_CORE + "sizing.backends.resolve:resolve", "InvalidInput"): (1, _ENGINE_RULES),
    (_CORE + "sizing.memory:check_overrides", "InvalidInput"): (2, _HAND),
    (_CORE + "sizing.draft_pages:check_draft", "InvalidInput"): (3, _FILES),
    (_CORE + "sizing.pages:_draft_pages", "InvalidInput"): (1, _INSPECTED),
    (_CORE + "sizing.pages:cache_geometry", "InvalidInput"): (1, _LAYOUT),
    (_CORE + "sizing.weights.text:_terms", "InvalidInput"): (1, _TENSOR),
    (_CORE + "sizing.weights.text:parameters_per_rank", "InvalidInput"): (1, _TENSOR),
    (_WORKER + "__main__:_parse", "TerminalError"): (1, _HAND),
    (_WORKER + "__main__:_read_checkpoint", "TerminalError.of_checkpoint"): (1, _ECHO),
    (_WORKER + "__main__:_read_model", "TerminalError.of_checkpoint"): (1, _ECHO),
    (_WORKER + "batch:FailedStep.result", "self._error"): (1, _ECHO),
    (_WORKER + "engine.engine:Engine._fail", "EngineDead"): (1, _REQUEST),
    (_WORKER + "engine.engine:Engine._fail", "dead"): (1, _REQUEST),
    (_WORKER + "engine.engine:Engine._fail", "error"): (1, _REQUEST),
    (_WORKER + "engine.engine:Engine.add", "InvalidInput"): (1, _REQUEST),
    (_WORKER + "engine.event_publisher:EventPublisher.__init__", "again"): (1, _ECHO),
    # Without prefixes to tell of, without pyzmq in the image, on a port that somebody has.
    (_WORKER + "engine.event_publisher:event_publisher", "TerminalError"): (3, _ENGINE_RULES),
    (_WORKER + "engine_startup:build_engine", "TerminalError"): (1, _ECHO),
    (_WORKER + "engine_startup:build_engine", "TerminalError.of_checkpoint"): (1, _ECHO),
    (_WORKER + "engine_startup:build_engine", "TerminalError.of_input"): (1, _ECHO),
    (_WORKER + "startup.accelerator_check:check_accelerator", "AcceleratorMismatch"): (1, _MACHINE),
    (_WORKER + "step.block_tables:BlockTables.check", "InvalidInput"): (1, _CONTRACT),
    (_WORKER + "layers.stored.int4:Int4Matrix._put_in_order", "ValueError"): (2, _FILES),
    (_WORKER + "layers.stored.matrix:StoredMatrix.held", "NotImplementedError"): (1, _CONTRACT),
    (_WORKER + "layers.stored.matrix:StoredMatrix.dense", "NotImplementedError"): (1, _CONTRACT),
    (_WORKER + "weights.contents:_check_scales", "InvalidCheckpoint"): (1, _FILES),
    (_WORKER + "weights.contents:_check_values", "InvalidCheckpoint"): (2, _FILES),
    (_WORKER + "weights.contents:_check_words", "InvalidCheckpoint"): (1, _FILES),
    (_WORKER + "weights.checkpoint_config:_faults_of_a_checkpoint", "InvalidCheckpoint"): (1, _ECHO),
    (_WORKER + "weights.checkpoint_config:_faults_of_a_checkpoint", "again"): (2, _ECHO),
    (_WORKER + "weights.checkpoint_config:read_architecture", "InvalidCheckpoint"): (1, _FILES),
    (_WORKER + "startup.container_limits:meminfo_bytes", "InvalidInput"): (1, _MACHINE),
    (_WORKER + "startup.device:_check_formats", "AcceleratorMismatch"): (1, _FORMATS),
    (_WORKER + "startup.device:kernel_table", "AcceleratorMismatch"): (1, _GENERATION),
    (_WORKER + "startup.device:select_device", "AcceleratorMismatch"): (1, _MACHINE),
    (_WORKER + "cache.host_lanes:StreamLane.await_ended", "HostMemoryError"): (1, _CONTRACT),
    (_WORKER + "cache.host_lanes:Lane.await_ended", "self.fault"): (1, _MACHINE),
    (_WORKER + "cache.host_memory:HostMemory.check", "fault"): (1, _MACHINE),
    (_WORKER + "step.packing_limits:PackingLimits.check", "InvalidInput"): (
        8, Rule("modelserve_worker.startup.profile_steps:heaviest_steps"),
    ),
    (_WORKER + "cache.kv_cache:KVCache.__init__", "InvalidInput"): (1, _CONTRACT),
    (_WORKER + "cache.kv_cache:KVCache.page_rows", "InvalidInput"): (1, _CONTRACT),
    (_WORKER + "cache.kv_stamps:ReadAudit.check", "AssertionError"): (1, _CONTRACT),
    (_WORKER + "runner.launched_step:LaunchedStep.constrain", "AssertionError"): (1, _CONTRACT),
    (_WORKER + "runner.launched_step:UnsampledStep.result", "AssertionError"): (1, _CONTRACT),
    (_WORKER + "weights.loader:_check_ordering", "InvalidCheckpoint"): (1, _FILES),
    (_WORKER + "weights.loader:_match", "InvalidCheckpoint"): (1, _FILES),
    (_WORKER + "weights.loader:load_model", "InvalidCheckpoint"): (1, _FILES),
    (_WORKER + "startup.memory:negotiate_model_len", "InsufficientMemory"): (1, _MEMORY),
    (_WORKER + "startup.memory:negotiate_model_len", "InvalidInput"): (2, _CONTEXT),
    (_WORKER + "ranks.ring:RankRing._wait", "RingAborted"): (1, _MACHINE),
    (_WORKER + "ranks.ring:check_ranks", "TerminalError"): (1, _CPUS),
    (_WORKER + "startup.replica:WorkerRanks._check_until", "RingAborted"): (1, _MACHINE),
    (_WORKER + "startup.replica:WorkerRanks.check", "self.failure"): (1, _MACHINE),
    (_WORKER + "startup.replica:WorkerRanks.compare", "RankDiedError"): (1, _MACHINE),
    (_WORKER + "startup.replica:WorkerRanks.start_beside", "result"): (1, _ECHO),
    (_WORKER + "startup.replica:WorkerRanks.start_beside", "self.failure"): (1, _MACHINE),
    (_WORKER + "startup.replica:_RankedStep.result", "again"): (2, _ECHO),
    (_WORKER + "startup.replica:_RankedStep.result", "self._workers.failure"): (2, _MACHINE),
    (_WORKER + "startup.replica:launch", "again"): (1, _ECHO),
    (_WORKER + "startup.rank:start_rank", "again"): (1, _ECHO),
    (_WORKER + "attention.table_audit:TableAudit.check", "AssertionError"): (1, _CONTRACT),
    (_WORKER + "weights.files:CheckpointFiles.scan", "InvalidCheckpoint"): (1, _FILES),
    (_WORKER + "weights.files:CheckpointFiles.scan", "again"): (1, _ECHO),
    (_WORKER + "weights.files:_scan", "InvalidCheckpoint"): (2, _FILES),
    (_WORKER + "weights.files:stored_dtype", "InvalidCheckpoint"): (2, _FILES),
    (_WORKER + "weights.reading:_Readers._read_run", "InvalidCheckpoint"): (1, _FILES),
    (_WORKER + "weights.reading:_Readers._take", "InvalidCheckpoint"): (1, _FILES),
    (_WORKER + "weights.reading:_Readers.run", "again"): (1, _ECHO),
    (_WORKER + "weights.reading:read_weights", "failed[0]"): (1, _ECHO),
    (_WORKER + "grammar.compiler:GrammarCompiler.__init__", "InvalidInput"): (1, _FILES),
    (_WORKER + "grammar.compiler:GrammarCompiler._compile", "InvalidInput"): (1, _REQUEST),
    (_WORKER + "grammar.matcher:GrammarMatcher._fail", "error"): (1, _REQUEST),
    (_WORKER + "kernels.compiling.compute_stream:check_compute_stream", "ComputeStreamError"): (1, _CONTRACT),
    (_WORKER + "kernels.compiling.cuda_kernel:build_defines", "ValueError"): (1, _HAND),
    (_WORKER + "kernels.compiling.cuda_kernel:_loaded", "again"): (1, _MACHINE),
    (_WORKER + "kernels.compiling.cuda_kernel:checked", "RuntimeError"): (1, _MACHINE),
    (_WORKER + "kernels.compiling.cuda_kernel:compiled", "RuntimeError"): (1, _MACHINE),
    # A product whose rows have other bits beside others, on a GPU or a library that nobody has measured.
    (_WORKER + "kernels.products.exact_products:check_places", "InvalidInput"): (1, _MACHINE),
    (_WORKER + "kernels.products.fp8_linear:repack_fp8", "ValueError"): (1, _FILES),
    (_WORKER + "kernels.products.int4_linear:repack_int4", "ValueError"): (3, _FILES),
    (_WORKER + "kernels.products.int8_linear:repack_int8", "ValueError"): (2, _FILES),
    (_WORKER + "kernels.products.nvfp4_linear:repack_nvfp4", "ValueError"): (1, _FILES),
    (_WORKER + "kernels.compiling.kernel_cache:compilations", "TerminalError"): (1, _MACHINE),
    (_WORKER + "kernels.compiling.kernel_cache:compilations", "again"): (1, _ECHO),
    (_WORKER + "kernels.compiling.kept_files:write_whole", "again"): (1, _MACHINE),
    (_WORKER + "layers.parallel:TensorParallel.kv_shard", "InvalidInput"): (1, _TENSOR),
    (_WORKER + "layers.parallel:TensorParallel.shard", "InvalidInput"): (1, _TENSOR),
    (_WORKER + "models.gemma4:Gemma4ForCausalLM.__init__", "InvalidInput"): (1, _TENSOR),
    (_WORKER + "models.dflash:DFlash.__init__", "InvalidInput"): (2, _PAIR),
    (_WORKER + "models.gemma4:Gemma4ForCausalLM.tap", "InvalidInput"): (1, _PAIR),
    (_WORKER + "weights.loader:_map_tokens", "InvalidCheckpoint"): (1, _FILES),
    (_WORKER + "weights.loader:load_dflash", "InvalidInput"): (1, _CONTRACT),
    (_WORKER + "models.gemma4_assistant:Gemma4Assistant.__init__", "InvalidInput"): (2, _PAIR),
    (_WORKER + "scheduling.admission:Admission.validate", "InvalidInput"): (4, _REQUEST),
    (_WORKER + "scheduling.adapter_slots:AdapterSlotTable.check", "InvalidInput"): (1, _REQUEST),
    (_WORKER + "scheduling.pages.arena:PageArena.allocate", "OutOfPagesError"): (1, _REQUEST),
    (_WORKER + "scheduling.prompt_spans:check_spans", "InvalidInput"): (3, _REQUEST),
    (
        _WORKER + "media.decode_pool:DecodePool._made",
        "AudioTooLong if status == TOO_LONG else AudioTooShort",
    ): (1, _REQUEST),
    (_WORKER + "media.decode_pool:DecodePool._made", "MediaUndecodable"): (1, _REQUEST),
    (_WORKER + "media.decode_pool:DecodePool._made", "self._too_much_memory"): (1, _REQUEST),
    (_WORKER + "media.decode_pool:DecodePool._started", "EOFError"): (1, _REQUEST),
    (_WORKER + "media.decode_pool:DecodePool.decode", "again"): (1, _REQUEST),
    (_WORKER + "media.decode_pool:DecodePool.decode", "self._verdict"): (1, _REQUEST),
    (_WORKER + "media.decode_pool:_Decoder.decode", "TimeoutError"): (1, _REQUEST),
    (_WORKER + "scheduling.scheduler:Scheduler.add", "InvalidInput"): (1, _REQUEST),
    (_WORKER + "server.http.authentication:ApiKeys.__init__", "InvalidInput"): (1, _FILES),
    (_WORKER + "server.http.authentication:_read", "ValueError"): (1, _FILES),
    (_WORKER + "server.flags:FlagParser.error", "InvalidInput"): (1, _HAND),
    (_WORKER + "server.flags:_document", "InvalidInput"): (2, _HAND),
    (_WORKER + "server.flags:server_settings", "InvalidInput"): (1, _HAND),
    (_WORKER + "server.flags:engine_args", "InvalidInput"): (3, _HAND),
    (_WORKER + "text.checkpoint_text:read_tokenizer_json", "InvalidInput"): (1, _FILES),
    (_WORKER + "text.gguf_tokenizer:_check_counts", "InvalidInput"): (1, _FILES),
    (_WORKER + "text.gguf_tokenizer:_pair", "InvalidInput"): (1, _FILES),
    (_WORKER + "text.gguf_tokenizer:_span", "InvalidInput"): (1, _FILES),
    (_WORKER + "text.gguf_tokenizer:_strings", "InvalidInput"): (1, _FILES),
    (_WORKER + "text.gguf_tokenizer:special_tokens", "InvalidInput"): (1, _FILES),
    (_WORKER + "text.gguf_tokenizer:tokenizer_json", "InvalidInput"): (1, _FILES),
    (_WORKER + "text.gguf_tokenizer:tokenizer_json", "UnsupportedModel"): (1, _FILES),
    (_WORKER + "text.chat_template:ChatTemplate.__init__", "InvalidInput"): (1, _FILES),
    (_WORKER + "text.chat_template:_raise_exception", "ChatTemplateError"): (1, _REQUEST),
    (_WORKER + "text.checkpoint_text:_chat_template", "InvalidInput"): (1, _FILES),
    (_WORKER + "text.checkpoint_text:_defaults", "InvalidInput"): (1, _FILES),
    (_WORKER + "text.checkpoint_text:load_checkpoint_text", "InvalidInput"): (2, _FILES),
    (_WORKER + "text.vocabulary:_piece_decoder", "InvalidInput"): (2, _FILES),
}  # fmt: skip
