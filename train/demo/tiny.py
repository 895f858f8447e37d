"""Writes the prompts behind `configs/data/tiny*.jsonl`, on which `configs/tiny_cpu.yaml` trains a head in two minutes.

    python -m train.demo.tiny --out runs/tiny
    python -m train.regenerate --target demo --data runs/tiny/prompts.jsonl --out runs/tiny/train --max-new-tokens 96
    python -m train.regenerate --target demo --data runs/tiny/heldout.jsonl --out runs/tiny/heldout --max-new-tokens 96

Questions of three kinds that the bundled target knows. The replies are the target's own.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import random
from pathlib import Path

from infer.common.programs import at_least_one, run

NAMES = ("Ada", "Bela", "Chen", "Dora", "Emil", "Fatma", "Goran", "Hana", "Igor", "Jaya",
         "Kofi", "Lena", "Mika", "Nora", "Omar", "Pia", "Quim", "Rosa", "Sven", "Tara")  # fmt: skip
THINGS = ("apples", "books", "candles", "dolls", "eggs", "flags", "guitars", "hats", "jars", "kites", "lamps",
          "marbles", "notebooks", "oranges", "pencils")  # fmt: skip
TOPICS = ("the moon", "a garden", "bicycles", "bread", "winter", "rivers", "a good friend", "libraries", "trains",
          "tea", "honey bees", "maps")  # fmt: skip
SUMS = (
    "{a} has {x} {thing} and buys {y} more. Then {b} takes {z} of them. How many {thing} does {a} have now?",
    "A box holds {x} {thing}. {a} packs {y} boxes and gives {z} {thing} to {b}. How many {thing} are left?",
    "{a} earns ${x} an hour and works {y} hours. {thing_} cost ${z} each. How many can {a} buy?",
    "{a} has {x} {thing}, {b} has {y} more than {a}. How many {thing} do they have together?",
)
WISHES = (
    "Write two sentences about {topic}.", "Give three tips for someone who is interested in {topic}.",
    "Explain {topic} to a child.", "Write a short poem about {topic}.", "What do people like about {topic}?",
    "Name five words that have to do with {topic}.",
)  # fmt: skip
VERBS = ("count", "find", "remove", "replace", "sort", "join", "split", "check", "load", "save")
NOUNS = ("names", "lines", "values", "items", "keys", "words", "paths", "numbers", "files", "rows")


@dataclasses.dataclass(frozen=True)
class Args:
    """Options of the program.

    Attributes:
      out: directory of prompts.jsonl and heldout.jsonl.
      count: training prompts.
      held: held-out prompts.
      seed: of the filled-in words.
    """

    out: Path = Path("runs/tiny")
    count: int = 288
    held: int = 24
    seed: int = 0


def prompt(number: int, draw: random.Random) -> str:
    """Returns question `number`; the three kinds take turns."""
    if number % 3 == 0:
        a, b = draw.sample(NAMES, 2)
        thing = draw.choice(THINGS)
        values = {"x": draw.randint(6, 60), "y": draw.randint(2, 12), "z": draw.randint(2, 5)}
        return draw.choice(SUMS).format(a=a, b=b, thing=thing, thing_=thing.capitalize(), **values)
    if number % 3 == 1:
        return draw.choice(WISHES).format(topic=draw.choice(TOPICS))
    verb, noun = draw.choice(VERBS), draw.choice(NOUNS)
    return (
        f"Complete the code I provided.\n\ndef {verb}_{noun}({noun}, limit={draw.randint(1, 9)}):\n"
        f'    """{verb.capitalize()} the {noun}."""\n'
    )


def main(args: Args) -> None:
    """Writes both files without a common prompt."""
    at_least_one(args, "count", "held")
    draw = random.Random(args.seed)
    found: dict[str, None] = {}
    for number in range(20 * (args.count + args.held)):
        if len(found) < args.count + args.held:
            found[prompt(number, draw)] = None
    prompts = list(found)
    draw.shuffle(prompts)
    args.out.mkdir(parents=True, exist_ok=True)
    for name, part in (("heldout", prompts[: args.held]), ("prompts", prompts[args.held :])):
        # `train.regenerate` replaces the reply.
        rows = [
            {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "-"}]} for text in part
        ]
        (args.out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        logging.info("%s: %d prompts", name, len(rows))


if __name__ == "__main__":
    run(main, Args, __doc__, log="plain")
