"""What each checkpoint is trained on, in which order."""

from __future__ import annotations

from dataclasses import dataclass, replace

from batches import Stream

from modelserve_tools.evaluation.short_skills import SHORT_SKILLS


@dataclass(frozen=True)
class Phase:
    """`steps` optimizer steps; `streams` take turns in proportion to their shares. `decay`: the rate falls to zero."""

    name: str
    steps: int
    streams: tuple[tuple[Stream, int], ...]
    decay: bool = False

    def stream_of(self, step: int) -> int:
        """Index into `streams` at `step`: shares 2 and 1 give 0, 0, 1, 0, 0, 1, ..."""
        turn = step % sum(share for _, share in self.streams)
        for index, (_, share) in enumerate(self.streams):
            if turn < share:
                return index
            turn -= share
        raise AssertionError("shares are positive")


@dataclass(frozen=True)
class Schedule:
    """`rate` is AdamW's peak learning rate, reached after `warmup` steps."""

    phases: tuple[Phase, ...]
    rate: float = 2e-3
    warmup: int = 100

    def scaled(self, factor: float) -> Schedule:
        """The same with `factor` times the steps."""
        phases = tuple(replace(phase, steps=max(1, round(phase.steps * factor))) for phase in self.phases)
        return replace(self, phases=phases)

    def steps(self) -> int:
        return sum(phase.steps for phase in self.phases)


# Every batch holds about 65,000 tokens. Short rows first, where a step is cheap: few codes to choose from, then more;
# codes that are much alike come when a model can look one up at all. Then longer rows, until distances of 16,000 tokens
# are trained. Short skills are asked all the time, most often those that take longest to learn; a lookback is as long
# as ten of the others.
_SKILLS = dict.fromkeys(SHORT_SKILLS, 1.0) | {"arithmetic": 3.0, "thinking": 4.0, "lookback": 0.6}
_START = Stream(
    512, rows=128, answers=224, lessons=0.2, single=0.1, primers=0.2, doubling=80, alike=0.0, skills=_SKILLS
)
_ALL = Stream(1024, rows=64, answers=320, lessons=0.15, single=0.15, primers=0.05, items=64, alike=0.5, skills=_SKILLS)
_MIDDLE = Stream(4096, rows=16, answers=768, lessons=0.6, single=0.4, alike=0.0)
_LONG = Stream(16_640, rows=4, answers=1152, lessons=0.5, single=0.5, alike=0.5)

_FULL = Schedule(
    phases=(
        Phase("start", 350, ((_START, 1),)),
        Phase("items", 800, ((replace(_ALL, alike=0.0), 1),)),
        Phase("middle", 150, ((_MIDDLE, 1), (replace(_ALL, alike=0.0), 2))),
        Phase("alike", 600, ((replace(_MIDDLE, alike=0.8), 1), (replace(_ALL, lessons=0.3, alike=0.8), 2))),
        Phase("long", 250, ((_LONG, 1), (_ALL, 1))),
        Phase("anneal", 850, ((_LONG, 1), (_ALL, 3)), decay=True),
    ),
    rate=2.5e-3,
)

SCHEDULES = {"gemma4-tiny-keqv": replace(_FULL.scaled(0.8), rate=2e-3), "gemma4-tiny-ple": _FULL}


def toy(steps: int) -> Schedule:
    """Minutes on a CPU: short skills and short lessons only."""
    skills = {skill: 1.0 for skill in SHORT_SKILLS if skill != "lookback"}  # that one is longer than a row
    stream = Stream(length=256, rows=8, answers=192, lessons=0.1, primers=0.1, skills=skills)
    return Schedule(phases=(Phase("toy", steps, ((stream, 1),)),), warmup=20)
