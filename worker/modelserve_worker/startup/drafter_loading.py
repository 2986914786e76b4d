"""From EngineArgs to what proposes tokens beside a model: prompt lookup, an assistant, what drafts blocks, or all."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal, TypedDict

from modelserve.engine_args import EngineArgs
from modelserve.inspection import read_drafters
from modelserve.model.assistant import AssistantArchitecture
from modelserve.model.drafters.reading import DrafterArchitecture
from modelserve.published import lineage_problem
from modelserve.sizing.speculation import Speculation
from modelserve_worker.drafters.assistant_drafter import AssistantDrafter
from modelserve_worker.drafters.block_drafter import BlockDrafter
from modelserve_worker.drafters.drafter import Drafter, LongestProposal
from modelserve_worker.drafters.prompt_lookup import PromptLookup
from modelserve_worker.models.gemma4 import Gemma4ForCausalLM
from modelserve_worker.weights.loader import load_assistant, load_dflash

logger = logging.getLogger(__name__)


class _Loading(TypedDict):
    load_format: Literal["auto", "dummy"]
    seed: int


def drafter_of(args: EngineArgs, model: Gemma4ForCausalLM, speculation: Speculation) -> Drafter | None:
    """What proposes tokens to `model`, which is loaded; for contexts as long as its architecture's.

    A found repetition is heard where it is as long as what a drafter says, which always says as much as it may.
    Raises InvalidInput (UnsupportedModel, InvalidCheckpoint among them) for an assistant that cannot be loaded, or is
    that of another model.
    """
    num_tokens, drafters = speculation.num_tokens, list[Drafter]()
    if args.prompt_lookup:
        longest, device = model.architecture.max_position_embeddings, model.norm.weight.device
        drafters.append(
            PromptLookup(
                num_tokens=num_tokens,
                max_num_seqs=args.max_num_seqs,
                max_model_len=longest,
                device=device,
                backend=model.operations.lookup,
            )
        )
    for directory, architecture in read_drafters(args):
        if problem := lineage_problem(args.model, str(directory)):
            logger.warning("%s", problem)
        drafters.append(_of_directory(directory, architecture, args, model, speculation))
    if len(drafters) > 1:
        return LongestProposal(drafters)
    return drafters[0] if drafters else None


def _of_directory(
    directory: Path, architecture: DrafterArchitecture, args: EngineArgs, model: Gemma4ForCausalLM,
    speculation: Speculation,
) -> AssistantDrafter | BlockDrafter:  # fmt: skip
    loading: _Loading = {"load_format": args.load_format, "seed": args.seed}
    drafter: AssistantDrafter | BlockDrafter
    if not isinstance(architecture, AssistantArchitecture):
        drafter = BlockDrafter(
            load_dflash(directory, model, **loading), model, num_tokens=speculation.num_tokens,
            max_num_seqs=args.max_num_seqs,
            step_rows=max(args.max_num_batched_tokens, speculation.step_rows(args.max_num_seqs)),
        )  # fmt: skip
    else:
        assistant = load_assistant(directory, model, **loading)
        drafter = AssistantDrafter(assistant, num_tokens=speculation.num_tokens, max_num_seqs=args.max_num_seqs)
    logger.info("drafts of up to %d tokens by the drafter in %s", drafter.num_tokens, directory)
    return drafter
