"""Trains a policy by GRPO on arithmetic questions, and measures drafters on its rollouts while it changes.

    python -m train.grpo --out runs/grpo
    python -m train.grpo --out runs/gsm8k --prompts gsm8k/train.jsonl --max-prompt 80 --max-new-tokens 96
    python -m train.grpo --out runs/times --times 5 --figure

Every step draws `--samples` replies to the next `--questions-per-step` questions, once with each of `--drafters`. In
float32 their texts are the same, which every step checks. Then it updates the policy on them (arXiv:2402.03300) and the
head of "adapted" on their hidden states. Drafters:

- plain: none. frozen: the pair's head as it is. adapted: the head, updated after every step.
- history: prompt lookup in the replies of the last two rounds to the same questions.
- adapted+history: the chain of the lookup under the trees of the adapted head.

The reward has degrees, because the bundled target is weak (`train.loop.policy.reward`). OUT/result.json has a record
per step and is written after each. Ctrl-C ends the run after the step in progress. The last line of output is one JSON
object. Status 1: texts differed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

import eagle_jax
from eagle_jax.checkpoints import write_whole
from eagle_jax.core import Params
from eagle_jax.data.chat import chat_ids, with_stop_ids
from eagle_jax.runtime.compilation import machine, revision, use_compilation_cache
from eagle_jax.runtime.rollouts import RolloutOutput
from eagle_jax.training import Frozen, HeadTrainState, Objective, adapt, pack_replies, rollout_taps
from eagle_jax.viz import panels, png
from infer.common.interrupts import stop_event
from infer.common.programs import at_least_one, check_seed, listed, not_negative, run
from infer.common.timing import time_interleaved
from train.loop.figures import grpo_figure
from train.loop.places import alone_in
from train.loop.policy import (
    Samples,
    advantages,
    arithmetic,
    number_of,
    place_replies,
    read_reference_questions,
    reward,
    update_policy,
)

DRAFTERS = ("plain", "frozen", "adapted", "history", "adapted+history")
ROUNDS = 2
"""Rounds over the questions whose replies are the history."""
NGRAM = 8
"""Tokens of the longest n-gram of lookups."""
CLIP = 0.2
"""Bound of the ratio, as in the paper."""
OBJECTIVE = Objective(steps=3, remat=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Args:
    """Options of the program."""

    out: Path  # directory of result.json
    pair: Literal["demo", "smollm2"] = "demo"  # target and EAGLE-3 head to start from
    # file of questions with a number as reference answer (docs/training.md lists the forms); None generates them
    prompts: Path | None = None
    questions: int = 32  # number of questions; every round has the same order
    questions_per_step: int = 8  # questions per step
    samples: int = 4  # replies to each question: a group
    max_prompt: int = 64  # longest prompt in tokens; longer questions are left out
    max_new_tokens: int = 48  # tokens per reply
    temperature: float = 1.0  # of the draws
    lanes: int = 8  # replies at a time
    steps: int = 50  # steps of the policy
    updates: int = 2  # updates of policy and head per step
    rate: float = 3e-4  # learning rate of the policy; the small policy hardly moves at 1e-5
    head_rate: float = 3e-4  # learning rate of the head
    kl: float = 0.0  # weight of the divergence from the initial policy
    # drafters to compare, of plain, frozen, adapted, history and adapted+history
    drafters: str = "frozen,adapted,history,adapted+history"
    times: int = 0  # in every N-th step also time the rollouts of all drafters and of plain decoding, twice, in turns
    figure: bool = False  # also draw OUT/grpo.png at the end (needs matplotlib)
    seed: int = 0  # seed of questions and draws


def check(args: Args) -> list[str]:
    """Checks the options and returns the drafters.

    Raises:
      ValueError: an option is out of range; the message names it.
    """
    at_least_one(args, "questions", "questions_per_step", "max_prompt", "max_new_tokens", "lanes", "steps", "updates")
    not_negative(args, "kl", "rate", "head_rate", "times")
    check_seed(args)
    if args.samples < 2:
        raise ValueError(f"--samples must be at least 2, got {args.samples}. A group compares its replies.")
    if args.temperature <= 0:
        raise ValueError(f"--temperature must be above 0, got {args.temperature}. GRPO needs samples that differ.")
    if args.questions % args.questions_per_step:
        raise ValueError(
            f"--questions must be a multiple of --questions-per-step, {args.questions_per_step}, got {args.questions}. "
            "Change one of them."
        )
    names = listed(args, "drafters")
    if unknown := [name for name in names if name not in DRAFTERS]:
        raise ValueError(f"--drafters must be of {', '.join(DRAFTERS)}, got {unknown[0]!r}. Choose from these.")
    return names if not args.times or "plain" in names else ["plain", *names]


class Loop:
    """Holds policy, head and history, and advances them step by step."""

    def __init__(self, args: Args, names: Sequence[str]) -> None:
        self.args, self.names = args, names
        target, self.head, self.tokenizer = eagle_jax.load_demo("smollm2" if args.pair == "smollm2" else "eagle3")
        self.target = with_stop_ids(target, self.tokenizer)
        self.initial = self.target.params
        self.questions, self.prompts = self._questions()
        self.tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(args.rate))
        self.head_tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(args.head_rate))
        self.opt_state = jax.jit(self.tx.init)(self.initial)
        weights = self.head.params["head"]
        key = jax.random.key(args.seed)
        self.head_state = HeadTrainState(weights, jax.jit(self.head_tx.init)(weights), jnp.int32(0), key)
        self.lookups = [
            eagle_jax.prompt_lookup(self.target, ngram=NGRAM, length=6, shortest=shortest, history=[])
            for shortest in (1, 3)
        ]
        self.rounds: dict[int, list[list[list[int]]]] = {}  # replies, by place of the questions

    def _questions(self) -> tuple[list[Any], list[list[int]]]:
        """Returns the first questions that are short enough, and their prompts."""
        args = self.args
        given = args.prompts
        found = arithmetic(args.questions, args.seed) if given is None else read_reference_questions(given)
        texts = ((one, chat_ids(self.tokenizer, [{"role": "user", "content": one.text}])) for one in found)
        kept = [(one, prompt) for one, prompt in texts if len(prompt) <= args.max_prompt][: args.questions]
        if len(kept) < args.questions:
            raise ValueError(
                f"--questions must be at most the {len(kept)} prompts of at most --max-prompt {args.max_prompt} "
                f"tokens, got {args.questions}. Lower it, or raise --max-prompt."
            )
        return [one for one, _ in kept], [prompt for _, prompt in kept]

    def drafters(self, start: int) -> dict[str, eagle_jax.BoundDrafter | None]:
        """Returns the drafters for the current policy; `start` is the place of its questions."""
        rounds, prompts = self.rounds.get(start, []), self.prompts[start : start + self.args.questions_per_step]
        history = [sample for samples in rounds for sample in samples]
        owners = [prompt for prompt in prompts for _ in range(self.args.samples)] * len(rounds)
        adapted = self._bind({**self.head.params, "head": self.head_state.head})
        alone, chain = (lookup.with_history(history, owners) for lookup in self.lookups)
        every = {
            "plain": None, "frozen": self._bind(self.head.params), "adapted": adapted, "history": alone,
            "adapted+history": adapted.with_lookup(chain),
        }  # fmt: skip
        return {name: every[name] for name in self.names}

    def _bind(self, params: Params) -> eagle_jax.DraftHead:
        return eagle_jax.DraftHead.from_params(self.head.config, params, self.target, self.head.tree)

    def step(self, number: int) -> dict[str, Any]:
        """Draws replies with every drafter, updates policy and head, and returns the record."""
        args = self.args
        start = number * args.questions_per_step % args.questions
        prompts = self.prompts[start : start + args.questions_per_step]
        key = jax.random.fold_in(jax.random.key(args.seed), number)
        taps = rollout_taps(self.target.config, self.head.config)
        calls = {
            name: functools.partial(
                eagle_jax.rollout, self.target, drafter, prompts, lanes=args.lanes, samples_per_prompt=args.samples,
                max_new_tokens=args.max_new_tokens, temperature=args.temperature, key=key, log_probs="law",
                taps=taps if name in ("adapted", "adapted+history") else None,  # a head in training needs them
            )
            for name, drafter in self.drafters(start).items()
        }  # fmt: skip
        outs = {name: call() for name, call in calls.items()}
        out = next((outs[name] for name in ("adapted", "adapted+history") if name in outs), outs[self.names[0]])
        record = {
            "step": number, "tau": {name: round(each.tau, 4) for name, each in outs.items()},
            "passes": {name: each.passes for name, each in outs.items()},
            "different": sum(ours != theirs for each in outs.values()
                             for ours, theirs in zip(each.tokens, out.tokens, strict=True)),
        }  # fmt: skip
        if args.times and number % args.times == 0:
            record["seconds"] = {name: round(value, 4) for name, value in time_interleaved(calls, 2).items()}
        record |= self._train(start, prompts, out)
        self.rounds[start] = [*self.rounds.get(start, []), out.tokens][-ROUNDS:]
        return record

    def _train(self, start: int, prompts: list[list[int]], out: RolloutOutput) -> dict[str, Any]:
        """Updates policy and head on a rollout, and returns their part of the record."""
        args, config = self.args, self.target.config
        ended = [text[-1] in config.eos_ids for text in out.tokens]
        texts = [self.tokenizer.decode(tokens, skip_special_tokens=True) for tokens in out.tokens]
        answers = [self.questions[start + row // args.samples].answer for row in range(len(texts))]
        rewards = np.array(list(map(reward, texts, ended, answers)))
        width = max(map(len, self.prompts)) + args.max_new_tokens
        assert out.log_probs is not None
        # The packing needs features; a policy alone needs none.
        features = out.features or [np.zeros((0, config.hidden_size), np.float32)] * len(texts)
        rollouts = pack_replies(prompts, out.tokens, features, config.hidden_size, width)
        samples = Samples(
            rollouts.texts.tokens, rollouts.texts.supervised, place_replies(rollouts.texts.supervised, out.log_probs),
            jnp.asarray(advantages(rewards.reshape(-1, args.samples)).reshape(-1)),
        )  # fmt: skip
        record: dict[str, Any] = {
            "reward": round(float(rewards.mean()), 4),
            "correct": float(np.mean([number_of(text) == answer for text, answer in zip(texts, answers, strict=True)])),
            "ended": float(np.mean(ended)), "tokens": float(np.mean(list(map(len, out.tokens)))), "example": texts[0],
        }  # fmt: skip
        if out.features is not None:  # before the policy changes: the states are those of these parameters
            frozen = Frozen(self.target.params, self.head.params.get("d2t"))
            for _ in range(args.updates):
                self.head_state, report = adapt(
                    config, self.head.config, OBJECTIVE, self.head_tx, self.head_state, frozen, rollouts
                )
            record["head_loss"] = round(float(report.loss), 4)
        params = self.target.params
        for _ in range(args.updates):
            params, self.opt_state, loss = update_policy(
                config, self.tx, CLIP, args.kl, params, self.opt_state, samples, jnp.float32(args.temperature),
                self.initial,
            )  # fmt: skip
        self.target = dataclasses.replace(self.target, params=params)  # the same functions: no new program
        return record | {"loss": round(float(loss), 5)}


def main(args: Args) -> int:
    """Trains, writes the result after every step, and returns the exit status."""
    names = check(args)
    if args.figure:
        panels(1)  # raises without matplotlib
    with alone_in(args.out, ("result.json",), "a directory of train.grpo"), contextlib.ExitStack() as stack:
        loop = Loop(args, names)
        stop = stack.enter_context(stop_event())
        settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
        del settings["out"]
        result: dict[str, Any] = {"settings": settings, "machine": machine()}
        result["revision"] = revision(Path(__file__).parent)
        result["steps"] = steps = list[dict[str, Any]]()
        for number in range(args.steps):
            steps.append(loop.step(number))
            write_whole(args.out / "result.json", json.dumps(result, indent=1) + "\n")
            logging.info("%s", json.dumps({name: value for name, value in steps[-1].items() if name != "example"}))
            if stop.is_set():
                logging.info("stopped after step %d", number)
                break
        if args.figure:
            write_whole(args.out / "grpo.png", png(grpo_figure(steps)))
    print(json.dumps(summary(steps)))
    return 130 if stop.is_set() else int(any(step["different"] for step in steps))


def summary(steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns means over the first and the last fifth of the steps, and what all steps have in common."""
    part = max(1, len(steps) // 5)

    def ends(values: Sequence[float]) -> list[float]:
        return [round(float(np.mean(values[:part])), 3), round(float(np.mean(values[-part:])), 3)]

    found: dict[str, Any] = {"steps": len(steps), "different": sum(step["different"] for step in steps)}
    found |= {name: ends([step[name] for step in steps]) for name in ("reward", "correct", "ended", "tokens")}
    found["tau"] = {name: ends([step["tau"][name] for step in steps]) for name in steps[0]["tau"]}
    if timed := [step["seconds"] for step in steps if "seconds" in step]:  # of the first and the last timed step
        found["seconds"] = {name: [timed[0][name], timed[-1][name]] for name in timed[0]}
    return found


if __name__ == "__main__":
    use_compilation_cache()
    run(main, Args, __doc__, log="timed")
