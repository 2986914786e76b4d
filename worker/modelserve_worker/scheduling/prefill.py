"""How a step's prefill tokens are shared among the requests that still have prompt to compute.

Half goes to the oldest prefill, rounded up. The rest goes to the shortest remaining first, and what they do not take
falls to the longer ones, the oldest in its place among them. With T prefill tokens a step, T >= 2:

Short prompts do not wait for long ones. A prompt of n tokens beside any number of longer ones has its first token in
ceil(n / floor(T / 2)) steps; shorter ones add their own tokens to n. Of all orders, shortest remaining first has the
least mean time to the first token that half of the tokens can buy.

Long prompts do not starve. The oldest prefill gets at least half of every step, whatever arrives, so it needs at most
twice the steps that it needs alone; then the next oldest takes its place. A prompt therefore ends within the steps that
it and its elders need at half speed, a bound that no younger request can change.

Nothing is wasted: the whole of T is used while any prefill has tokens left. Equal prompts are computed one after the
other (ties go to the oldest), so a step reads few contexts, as first come first served would.
"""

from __future__ import annotations

import numpy as np

from modelserve_worker.batch import Int32Array


def share_prefill_tokens(remaining: Int32Array, budget: int) -> Int32Array:
    """Tokens of this step for each prefill, from the tokens that each has `remaining`, oldest first; [P] to [P]."""
    shares = np.zeros_like(remaining)
    if not len(remaining):
        return shares
    shares[0] = min(int(remaining[0]), -(-budget // 2))
    budget -= int(shares[0])
    for index in np.argsort(remaining, kind="stable").tolist():
        taken = min(int(remaining[index] - shares[index]), budget)
        shares[index] += taken
        budget -= taken
        if not budget:
            break
    return shares
