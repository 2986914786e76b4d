"""The supply that previews are made from: the newest one over which a plan takes milliseconds.

What thousands of nodes offer takes a fifth of a second of CPU to put together, and the first plan of a model as long.
An apply does not wait for either: it is done beside the reviews, which go on over the supply before.
"""

from __future__ import annotations

import asyncio
import gc

from modelserve.api import API_VERSION, KIND, ModelServe
from modelserve.published import published_model, published_uris
from modelserve_operator.gathering.gather import Gatherer
from modelserve_operator.inventory.supply import Supply
from modelserve_operator.planning.revision_builder import offers_for, plan_for

LOOK_SECONDS = 0.25


class WarmSupply:
    """`now` is what previews use."""

    def __init__(self, gatherer: Gatherer) -> None:
        self._gatherer = gatherer
        self.now = gatherer.supply()

    async def first(self) -> None:
        """Have a plan made of each published model, before the first review comes."""
        await asyncio.to_thread(_plans, self.now)
        gc.collect()
        gc.freeze()  # what is there now stays: no search for garbage goes through it again

    async def follow(self) -> None:
        """Take over what changes, for ever."""
        while True:
            supply = self._gatherer.supply()
            if supply is not self.now:
                await asyncio.to_thread(self.put_together, supply)
                self.now = supply
            await asyncio.sleep(LOOK_SECONDS)

    def put_together(self, supply: Supply) -> None:
        """What pools offer is there with the supply from now on."""
        offers_for(_serve(published_uris()[0]).spec, supply)


def _plans(supply: Supply) -> None:
    for uri in published_uris():
        facts = published_model(uri)
        if facts is not None:
            plan_for(_serve(uri).spec, facts, supply)


def _serve(uri: str) -> ModelServe:
    metadata = {"name": "any", "namespace": "default"}
    return ModelServe.parse(
        {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": {"model": {"uri": uri}}}
    )
