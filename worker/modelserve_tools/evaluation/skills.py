"""Exercises by name, seed and number: the same arguments give the same exercise in every process."""

from __future__ import annotations

import random

from modelserve_tools.evaluation.exercise import Exercise
from modelserve_tools.evaluation.long_skills import LONG_SKILLS
from modelserve_tools.evaluation.short_skills import SHORT_SKILLS


def exercise(skill: str, *, seed: int, index: int, distance: int | None = None) -> Exercise:
    """Number `index` of a skill's exercises for evaluation; `distance` in tokens, for the long skills only.

    The generator's seed is a text that begins with "evaluation", which no trainer's does. Raises ValueError for a
    skill that does not exist, and for a distance that is missing, negative, or given to a short skill.
    """
    rng = random.Random(f"evaluation {skill} {seed} {index} {distance}")  # noqa: S311 - exercises are no secrets
    if skill in LONG_SKILLS:
        if distance is None:
            raise ValueError(f"skill {skill!r} needs a distance in tokens, such as distance=1000")
        return LONG_SKILLS[skill](rng, distance)
    if skill not in SHORT_SKILLS:
        raise ValueError(f"no skill {skill!r}; there are {', '.join([*SHORT_SKILLS, *LONG_SKILLS])}")
    if distance is not None:
        raise ValueError(f"skill {skill!r} has no distance, but distance={distance}; leave it out")
    return SHORT_SKILLS[skill](rng)
