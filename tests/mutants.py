"""Applies one-line faults to a copy of the tree, and runs the tests that must fail.

    python tests/mutants.py [NAME ...]      some of them, by words of their names; `make mutants` runs all

Prints a line per fault and `killed n/n` last; the exit status is 1 where a fault survived. Every selection is part of
`make test`.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("eagle_jax", "infer", "train", "tests", "configs", "docs")
ENGINE = "tests/core/test_engine.py"
TEXTS = f"{ENGINE} -k of_a_slow_loop"
STATIC, DRAWN = f"{TEXTS}[static-greedy]", f"{TEXTS}[k3n12-cut]"
ADAPTIVE = "tests/runtime/test_adaptive.py"
CHANCES = "tests/runtime/test_chances.py"
LAW = "tests/core/test_law.py"
ROLLOUT = "tests/core/test_rollout.py -k of_generate"
HISTORY = "tests/drafters/test_history.py"
COMBINED = "tests/drafters/test_combined.py"
TAPS = "tests/core/test_taps.py"
POLICY = "tests/training/test_on_policy.py"
KERNEL = "tests/kernels -k kernel_equals_the_definition"


class Mutant(NamedTuple):
    """One fault: the line `old` of `file` becomes `new`, and `tests` (arguments of pytest) must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: str


MUTANTS = (
    Mutant("adapters are added without their scale", "checkpoints/memory/adapters.py", "alpha / rank * product",
           "product", "tests/checkpoints/test_adapters.py -k merged"),
    Mutant("inputs and outputs of an adapter change places", "checkpoints/memory/adapters.py",
           "[*inputs, *outputs].index(letter)", "[*outputs, *inputs].index(letter)",
           "tests/checkpoints/test_adapters.py -k merged"),
    Mutant("a wrong child is accepted", "core/tree.py", "nodes[jnp.maximum(parents, 0)] & (tokens == token)",
           "nodes[jnp.maximum(parents, 0)]", DRAWN),
    Mutant("children of any node are accepted", "core/tree.py", "(parents >= 0) & nodes[jnp.maximum(parents, 0)] &",
           "(parents >= 0) &", DRAWN),
    Mutant("a node sees its siblings", "core/tree.py", "return reach > 0",
           "return (reach > 0) | (parents[:, :, None] == parents[:, None, :])", STATIC),
    Mutant("the mask ends at the grandparent", "core/tree.py", "while span < depth:", "while span < min(depth, 2):",
           "tests/core/test_tree.py -k transitive_closure"),
    Mutant("positions by row", "core/loop.py", "positions = state.cache.length[:, None] + node_depths(mask)",
           "positions = state.cache.length[:, None] + jnp.arange(mask.shape[1])[None]", STATIC),
    Mutant("the chunk's start is not in its positions", "core/prompts.py",
           "positions = base[:, None] + start + jnp.arange(chunk)[None]",
           "positions = base[:, None] + jnp.arange(chunk)[None]", f"{ENGINE} -k plain_decoding"),
    Mutant("commit one slot off", "core/cache.py", "length=cache.length + count,", "length=cache.length + count + 1,",
           STATIC),
    Mutant("the path is committed by row", "core/loop.py", "jnp.take_along_axis(rows, path[:, None, :, None], axis=2)",
           "rows[:, :, : depth + 1]", STATIC),
    Mutant("a wrong child is followed", "core/verify.py", "(tree.parents >= 0) & (tree.tokens == above)",
           "(tree.parents >= 0)", STATIC),
    Mutant("a node is followed without its parent", "core/verify.py", "jnp.all(follows[:, None, :] | ~mask, axis=2)",
           "follows", "tests/core/test_tree.py -k same_text"),
    Mutant("noise is drawn for every node", "core/verify.py",
           "choose = lambda node, step: draw(logits[row, node], keys[row], index[row] + step, sampling)",
           "every = jax.vmap(lambda one, at: draw(one, keys[row], index[row] + at, sampling))(logits[row], "
           "jnp.arange(logits.shape[1])); choose = lambda node, step: every[node]",
           "tests/core/test_sampling.py -k visited"),
    Mutant("parents keep their rows when nodes are sorted", "core/tree.py", "jnp.argsort(order, axis=1)",
           "jnp.argsort(jnp.sort(order, axis=1), axis=1)", "tests/core/test_tree.py -k first_rows"),
    Mutant("a child may precede its parent", "core/tree.py", "-jnp.min(above, axis=2)", "-tree.scores",
           "tests/core/test_tree.py -k first_rows"),
    Mutant("finished rows choose the size", "core/adaptive.py", "jnp.where(running, rows, 0)", "rows",
           f"{ADAPTIVE} -k most_tokens"),
    Mutant("drafting is free", "core/adaptive.py", "costs = prices.draft + prices.level * levels + ",
           "costs = prices.draft + ", f"{ADAPTIVE} -k most_tokens"),
    Mutant("a head is trusted for ever", "core/adaptive.py", "payoff.shift + jnp.clip(", "payoff.shift + 0 * jnp.clip(",
           f"{ADAPTIVE} -k most_tokens"),
    Mutant("scores are chances at temperature 0", "core/adaptive.py", "if sampling.greedy else payoff",
           "if False else payoff", f"{CHANCES} -k temperature_0"),
    Mutant("a row that lags counts as the others", "core/adaptive.py", "left / most)", "0 * left / most)",
           f"{CHANCES} -k count_more"),
    Mutant("all nodes are evidence alike", "core/adaptive.py", "values * (1 - values)", "values",
           f"{CHANCES} -k accepted"),
    Mutant("a score of 1 is certain", "core/adaptive.py", "jnp.minimum(jnp.exp(scores), SURE)", "jnp.exp(scores)",
           f"{CHANCES} -k odds"),
    Mutant("later levels are as likely as the frontier", "core/adaptive.py", "later = (fall[:, :, None] * front",
           "later = (fall[:, :, None] ** 0 * front", "tests/runtime/test_levels.py -k its_definition"),
    Mutant("plain steps never follow", "core/adaptive.py", "nothing | (balance < -slack - spare)", "False & nothing",
           f"{ADAPTIVE} -k few_cycles"),
    Mutant("a level's cost is ignored", "core/adaptive.py", "prices.level * levels[:, None]", "0 * levels[:, None]",
           "tests/runtime/test_levels.py -k room_for"),
    Mutant("a level is drafted whatever it costs", "drafters/tree_growth.py", "count + 1), count, levels)",
           "count + 1), count, count)", "tests/drafters/test_drafters.py -k further_level"),
    Mutant("a row that is over drafts on", "drafters/tree_growth.py", "settled = ~running | (", "settled = (",
           "tests/drafters/test_drafters.py -k further_level"),
    Mutant("a row that is over walks on", "core/verify.py", "jnp.where(jnp.expand_dims(mine.descends, ",
           "jnp.where(jnp.expand_dims(mine.descends | True, ", "tests/core/test_tree.py -k walks_as_alone"),
    Mutant("a call knows nothing of the last one", "core/loop.py", "else adaptive.resume(payoff)",
           "else adaptive.start()", "tests/runtime/test_payoff.py -k earlier_ones"),
    Mutant("a rollout knows nothing of the last one", "core/lanes.py", "else adaptive.resume(payoff)",
           "else adaptive.start()", "tests/runtime/test_rollouts.py -k costs_and_profiles"),
    Mutant("a new text inherits the debt", "core/adaptive.py", "jnp.maximum(payoff.balance, 0), payoff.balance)",
           "payoff.balance, payoff.balance)", "tests/runtime/test_payoff.py -k new_chance"),
    Mutant("plain steps go on over a new text", "core/adaptive.py", "jnp.where(pays, 0, payoff.wait)", "payoff.wait",
           "tests/runtime/test_payoff.py -k new_chance"),
    Mutant("a draw is free", "core/adaptive.py", "token * kept", "0 * kept", f"{ADAPTIVE} -k costs_its_draw"),
    Mutant("a chain beside a tree is a level", "core/loop.py", "tree.parents[:, : drafter.level_nodes + 1]",
           "tree.parents", "tests/drafters/test_combined.py -k no_level"),
    Mutant("a level is worth what its scores promise", "core/adaptive.py", "front = chances(payoff, frontier)",
           "front = jnp.exp(frontier)", "tests/runtime/test_levels.py -k not_believed"),
    Mutant("a draft has no margin", "core/adaptive.py", " - MARGIN * jnp.maximum(cost - 1, 0)", "",
           "tests/runtime/test_payoff.py -k remembers"),
    Mutant("a burst has no room", "core/prompts.py", "slots + more)", "slots)", f"{ADAPTIVE} -k burst_fits"),
    Mutant("drafting of any tree can stop", "drafters/tree_growth.py",
           "with_limit if tree.rerank and (rule, tree.parents) == (None, None) else None", "with_limit",
           "tests/programs/test_tune.py -k empty_cycle"),
    Mutant("an empty cycle drafts one level", "../infer/tuning/costs.py", "level * self.levels.get(method, 1)", "level",
           "tests/programs/test_tune.py -k all_levels_of_an_empty"),
    Mutant("plain steps may be fewer than none", "runtime/generation.py", "!= value or value < 0)", "!= value)",
           "tests/runtime/test_payoff.py -k earlier_output"),
    Mutant("a cost has axes", "runtime/request.py", "value.ndim == 0 and", "",
           "tests/runtime/test_payoff.py -k one_cost"),
    Mutant("a balance has no bound", "core/adaptive.py", "payoff.balance + saved, SLACK",
           "payoff.balance + saved, 1e9", f"{ADAPTIVE} -k pauses"),
    Mutant("plain steps pay nothing back", "core/adaptive.py", "LOSS * steps", "0 * steps",
           f"{ADAPTIVE} -k after_a_burst"),
    Mutant("an empty draft is free", "core/adaptive.py", "costs = prices.draft + ", "costs = ",
           f"{ADAPTIVE} -k promised_too_much"),
    Mutant("levels weigh without their draft", "core/adaptive.py", "whole = prices.draft + prices.passes[None]",
           "whole = prices.passes[None]",
           "tests/runtime/test_levels.py -k its_definition"),
    Mutant("drafts usually cost their levels alone", "core/adaptive.py", "prices.passes + prices.draft + ",
           "prices.passes + ", f"{ADAPTIVE} -k usual_follows"),
    Mutant("an empty draft costs a level twice", "../infer/tuning/costs.py", "one.empty.get(method, 0.0) - level",
           "one.empty.get(method, 0.0)", "tests/programs/test_tune.py -k adds_to_a_plain"),
    Mutant("costs are those of the first token", "../infer/tuning/costs.py", "int(part * setting.max_new_tokens)", "0",
           "tests/programs/test_tune.py -k within_replies"),
    Mutant("a part begins once", "../infer/common/timing.py", "for carry in (self.carry, *others)",
           "for carry in (self.carry, *others)[-1:]", "tests/programs/test_measure.py -k every_carry"),
    Mutant("the block in which a row ends is full", "kernels/tpu_attention.py", "(at + 1) * block <= filled",
           "at * block < filled", "tests/kernels/test_tpu_attention.py -k equals_the_definition"),
    Mutant("nothing is usual", "core/adaptive.py", "choice.worth + usual", "choice.worth + 1",
           f"{ADAPTIVE} -k usually_pay"),
    Mutant("drafts go on where none is worth its cost", "core/adaptive.py", "fails = nothing | (", "fails = (",
           f"{ADAPTIVE} -k worth_its_cost"),
    Mutant("a size is taken that is not worth its cost", "core/adaptive.py", "gain - whole, worth", "worth, worth",
           f"{ADAPTIVE} -k most_tokens"),
    Mutant("a batch gains its mean", "core/adaptive.py", "gain = _weights(state, refilled) @",
           "gain = _weights(state, True) @", f"{ADAPTIVE} -k left_emit"),
    Mutant("refilled lanes gain their slowest", "core/adaptive.py", "gain = _weights(state, refilled) @",
           "gain = _weights(state, False) @", f"{ADAPTIVE} -k left_emit"),
    Mutant("accepted drafts vary as one draft would", "core/adaptive.py", "(2 * depths - 1)", "1",
           f"{ADAPTIVE} -k slowest_of_equal"),
    Mutant("no row falls behind", "core/adaptive.py", "astype(jnp.float32) - choice.lag", "astype(jnp.float32)",
           f"{ADAPTIVE} -k left_emit"),
    Mutant("a burst costs no wait", "core/adaptive.py", "jnp.maximum(payoff.wait - steps, 0)", "payoff.wait - 1",
           f"{ADAPTIVE} -k after_a_burst"),
    Mutant("a burst outlives free lanes", "core/lanes.py", "jnp.where(more, -(-len(state.job) // 8), 0)",
           "jnp.where(more, 99, 0)", "tests/core/test_rollout.py -k whatever_a_cycle"),
    Mutant("passes of a burst are one", "core/lanes.py", "passes = jnp.max(lanes.cycles - state.lanes.cycles)",
           "passes = jnp.minimum(jnp.max(lanes.cycles - state.lanes.cycles), 1)",
           "tests/core/test_rollout.py -k whatever_a_cycle"),
    Mutant("costs of the smallest cache hold everywhere", "core/loop.py", "slots_read(state.cache), all_sizes",
           "1.0, all_sizes", "tests/core/test_costs.py -k large_cache_alone"),
    Mutant("the drafter reads too few tokens", "core/checked.py", "(longest > fewer) & (longest <= width)",
           "(longest > fewer) & (longest <= width + 1)", "tests/core/test_costs.py -k no_more_than"),
    Mutant("a cache is read whole", "core/cache.py", "jnp.minimum(held, cache.slots)", "0 * held + cache.slots",
           "tests/core/test_costs.py -k blocks_that_hold"),
    Mutant("levels are free", "core/loop.py", "weigh if cost.has_levels else None", "None",
           f"{ADAPTIVE} -k drafting_stops"),
    Mutant("savings may not be lost again", "core/adaptive.py", "jnp.maximum(payoff.saved, 0) / 2", "0.0",
           "tests/runtime/test_payoff.py -k half_of"),
    Mutant("a call forgets what the tuning predicted", "core/adaptive.py", "MEMORY * (expected or 0)", "0",
           "tests/runtime/test_payoff.py -k promises"),
    Mutant("a rollout forgets what the tuning predicted", "runtime/rollouts.py",
           "checked_payoff(payoff, cycle_cost, drafter, method)", "payoff",
           "tests/programs/test_profiles.py -k tuning_predicted"),
    Mutant("auto forgets its costs", "runtime/profile.py", "self.drafters[entry], entry.cost",
           "self.drafters[entry], None", "tests/programs/test_profiles.py -k follows_the_profile"),
    Mutant("the GPU kernel reads the whole cache", "kernels/gpu_attention.py", "blocks = pl.cdiv(filled, BLOCK)",
           "blocks = pl.cdiv(slots, BLOCK)", "tests/kernels/test_gpu_attention.py -k not_read"),
    Mutant("shares of the cache are joined unweighted", "kernels/gpu_attention.py", "kept = jnp.exp(tops - top)",
           "kept = jnp.exp(0 * tops)", "tests/kernels/test_gpu_attention.py -k 'kernel_equals'"),
    Mutant("a GPU takes the definition", "models/attention.py", '"cuda": _on_nvidia,', '"cuda": _attend,',
           "tests/kernels/test_gpu_attention.py -k lowered"),
    Mutant("a kernel has no gradient", "models/attention.py",
           "return jax.vjp(functools.partial(_attend, scale=scale), *operands)[1](grad)",
           "return jax.tree.map(lambda x: 0 * x, jax.vjp(functools.partial(_attend, scale=scale), *operands)[1](grad))",
           "tests/kernels/test_gpu_attention.py -k gradients"),
    Mutant("branches write the caches", "core/loop.py",
           "after, info = _commit(params, state._replace(drafter=drafter_state), tree, checked, engine)",
           "own = state._replace(drafter=drafter_state); after, info = jax.lax.switch(choice.rung, "
           "[lambda run=run: _commit(params, own, tree, run(), engine) for run in branches])",
           "tests/core/test_cache.py -k branch"),
    Mutant("a draw ignores NaN", "core/sampling.py", " | jnp.isnan(values)", "",
           "tests/core/test_sampling.py -k first_largest"),
    Mutant("a hash has another rotation", "core/randomness.py", "(17, 29, 16, 24)", "(17, 29, 16, 23)",
           "tests/core/test_randomness.py -k hash"),
    Mutant("a turn costs what a call does once", "../infer/common/timing.py", " - usual[name, FEW], 0.0)", ", 0.0)",
           "tests/programs/test_measure.py -k further_turns"),
    Mutant("a turn costs what a lucky call does", "../infer/common/timing.py", "QUARTILE = 0.25", "QUARTILE = 0.0",
           "tests/programs/test_measure.py -k lucky"),
    Mutant("a further draw costs the first one too", "../infer/tuning/costs.py", " - seconds.get(DRAW, 0.0), 0.0)",
           ", 0.0)", "tests/programs/test_tune.py -k adds_to_a_plain_step"),
    Mutant("a ladder has sizes that save nothing", "../infer/tuning/costs.py",
           "rows == 1 or any(one.at_rows(rows) < CHEAPER * one.at_rows(sizes[0]) for one in points)", "True",
           "tests/programs/test_tune.py -k adds_to_a_plain_step"),
    Mutant("costs are those of the first prompts", "../infer/bench.py", "middle = longest[(len(longest) - 1) // 2]",
           "middle = firsts[0]", "tests/programs/test_bench.py -k middle"),
    Mutant("a trial leaves out the costs", "../infer/tuning/search.py", "repeats, costs=parts)", "repeats)",
           "tests/programs/test_tune.py -k best_of_what"),
    Mutant("a trial forgets the costs", "../infer/tuning/trials.py", "setting, costs.get(label))", "setting)",
           "tests/programs/test_tune.py -k timed_with"),
    Mutant("a window is one token wider in the cache", "models/decoder.py", "positions - w + 1)", "positions - w)",
           "tests/runtime/test_windows.py -k 'whole_text and windows0'"),
    Mutant("a window is one node wider in a tree", "models/attention.py", "reverse=True) <= window)",
           "reverse=True) <= window + 1)", "tests/runtime/test_windows.py -k depth"),
    Mutant("the kernel sees a slot too many", "kernels/tpu_attention.py", "visible = slot < filled",
           "visible = slot <= filled", KERNEL),
    Mutant("the kernel's ring begins at its first slot", "kernels/tpu_attention.py",
           "position = last - jax.lax.rem(last, slots) + slot", "position = slot", KERNEL),
    Mutant("the kernel reads beyond the cache", "kernels/tpu_attention.py", "if slots % block:", "if False:", KERNEL),
    Mutant("the kernel fetches a block beyond a row", "kernels/tpu_attention.py",
           "pl.cdiv(jnp.minimum(length, slots), block) - 1", "pl.cdiv(jnp.minimum(length, slots), block)",
           "tests/kernels/test_tpu_attention.py -k fetched"),
    Mutant("the drafter does not read what the last draft needs", "core/adaptive.py",
           "return payoff.wait < jnp.max(left)", "return payoff.wait + 1 < jnp.max(left)",
           "tests/runtime/test_payoff.py -k later_drafts"),
    Mutant("the kernel forgets the sinks' share", "kernels/tpu_attention.py",
           "total, mixed = kept * total + jnp.exp(sinks_ref[group] - top), kept * mixed",
           "total, mixed = kept * total, kept * mixed", KERNEL),
    Mutant("the kernel does not rescale", "kernels/tpu_attention.py",
           "mixed_ref[group] = kept * mixed_ref[group] + added", "mixed_ref[group] = mixed_ref[group] + added", KERNEL),
    Mutant("the entry of a slot is the first that shares it", "core/cache.py",
           "entry = entry + (count - 1 - entry) // slots * slots", "entry = jnp.where(entry < count, entry, -1)",
           "tests/core/test_cache.py -k ring"),
    Mutant("a ring does not go on at its first slot", "core/cache.py", "    return write(ring, 0)",
           "    return ring if width < slots else write(ring, 0)", "tests/core/test_cache.py -k ring"),
    Mutant("a wrapped ring is rewound", "runtime/session.py", "known = known if there <= ring else 0", "pass",
           "tests/runtime/test_windows.py -k 'session and None'"),
    Mutant("a lane takes the job of another sample", "core/lanes.py", "+ state.sample - 1", "+ state.sample", ROLLOUT),
    Mutant("a lane keeps the drafter of its last job", "core/lanes.py", "pick(part, row), lane, 0), state.lanes, new)",
           "pick(part, row), lane, 0), state.lanes, new)._replace(drafter=state.lanes.drafter)", ROLLOUT),
    Mutant("a finished row emits", "core/loop.py", "return jnp.where(state.done, 0, emitted)",
           "return jnp.where(state.done, jnp.minimum(emitted, 1), emitted)", f"{ENGINE} -k plain_decoding"),
    Mutant("tokens behind a stop token are kept", "core/loop.py",
           "jnp.argmax(stops, axis=1) + 1, tokens.shape[1])", "jnp.argmax(stops, axis=1) + 2, tokens.shape[1])",
           TEXTS),
    Mutant("the budget is off by one", "core/loop.py", "first), state.budget - state.num_tokens)",
           "first), state.budget - state.num_tokens + 1)", TEXTS),
    Mutant("logits that are not finite are ignored", "core/prompts.py",
           "return jnp.isfinite(jnp.max(logits, axis=-1))", "return jnp.max(logits, axis=-1) == logits.max(-1)",
           f"{ENGINE} -k no_finite_logits"),
    Mutant("noise of the wrong position", "core/verify.py", "keys[row], index[row] + step, sampling)",
           "keys[row], index[row] + step + 1, sampling)", f"{ENGINE} -k 'plain_decoding and cut'"),
    Mutant("the noise of a row is that of the first", "core/sampling.py",
           "return gumbel(jax.random.fold_in(threefry_keys(key), index), tokens)",
           "return gumbel(jax.random.fold_in(jax.random.key(0), index), tokens)",
           "tests/core/test_sampling.py -k draws"),
    Mutant("top-p keeps one less", "core/sampling.py", "(tied & (before < top_p))", "(tied & (before + probs < top_p))",
           "tests/core/test_sampling.py"),
    Mutant("ties of top-p go to the higher id", "core/sampling.py", "(jnp.cumsum(tied, axis=-1) - 1)",
           "(jnp.cumsum(tied[..., ::-1], axis=-1)[..., ::-1] - 1)", "tests/core/test_sampling.py -k ties"),
    Mutant("the residual is dropped", "drafters/rules.py", "left = jnp.maximum(target - draft, 0.0)",
           "left = target", f"{LAW} -k 'joint_law and rejection'"),
    Mutant("a rejected draft stays in q", "drafters/rules.py", "rest = draft.at[token].set(0.0)", "rest = draft",
           f"{LAW} -k 'joint_law and traversal'"),
    Mutant("block verification forgets the bound", "drafters/rules.py",
           "reach = jnp.minimum(reach * ratio, 1.0)", "reach = reach * ratio", f"{LAW} -k 'joint_law and block'"),
    Mutant("a history wins at equal length", "drafters/pld.py", "better = theirs > width", "better = theirs >= width",
           f"{HISTORY} -k longest_match"),
    Mutant("a history drafts beyond a sample", "drafters/pld.py", "(jnp.cumsum(tokens == SEPARATOR) == 0) &",
           "(tokens != SEPARATOR) &", f"{HISTORY} -k longest_match"),
    Mutant("a history matches at a sample's end", "drafters/pld.py", "find(samples.tokens, followed, last,",
           "find(samples.tokens, samples.tokens >= 0, last,", f"{HISTORY} -k longest_match"),
    Mutant("a history begins with its first sample", "drafters/pld.py", "followed, last, True,",
           "followed, last, False,", f"{HISTORY} -k longest_match"),
    Mutant("a history is drafted past its end", "drafters/pld.py", "& (start + steps < samples.tokens.shape[0])",
           "& (start >= 0)", f"{HISTORY} -k searched_to"),
    Mutant("every history has its own size", "drafters/pld.py", "np.full((_power_of_two(max(LEAST_HISTORY, used)),),",
           "np.full((1024 + used,),", f"{HISTORY} -k full_length"),
    Mutant("samples are not replaced", "runtime/drafters.py",
           "return self.bind(method, self.target, {\"history\": history}, self.name, settings=self.settings)",
           "return self", f"{HISTORY} -k full_length"),
    Mutant("a sample of any prompt comes first", "drafters/pld.py", "2 * width + (preferred & (width > 0))", "width",
           f"{HISTORY} -k 'longest_match or own_prompt'"),
    Mutant("the own prompt beats a longer match", "drafters/pld.py", "2 * width + (preferred & (width > 0))",
           "width + 9 * (preferred & (width > 0))", f"{HISTORY} -k own_samples"),
    Mutant("a prompt is compared without its end", "drafters/pld.py", "jnp.where(at <= end, text[",
           "jnp.where(at < end, text[", f"{HISTORY} -k own_samples"),
    Mutant("a chain follows a node without its parent", "drafters/combined.py",
           "jnp.all(same[:, None, :] | ~mask, axis=2)", "same", f"{COMBINED} -k each_once"),
    Mutant("a chain is added as a whole", "drafters/combined.py", "(steps > most) & (steps <= known)",
           "(steps <= known)", f"{COMBINED} -k each_once"),
    Mutant("a chain begins at the root", "drafters/combined.py", "parents = jnp.where(steps == most + 1, fork,",
           "parents = jnp.where(steps == most + 1, 0,", f"{COMBINED} -k each_once"),
    Mutant("the combined tree has the tree's depth", "drafters/combined.py", "max(tree.depth, chain.depth)",
           "tree.depth", f"{COMBINED} -k slow_loop"),
    Mutant("a combined chain is not updated", "drafters/combined.py",
           'chain.update(_own(params, "chain"), state.chain, verified._replace(choices=None)),', "state.chain,",
           f"{COMBINED} -k slow_loop"),
    Mutant("a combined chain is not rewound", "drafters/combined.py", "rewind_chain(state.chain, length)",
           "state.chain", f"{COMBINED} -k sessions"),
    Mutant("rejected nodes have features", "core/loop.py", "kept = None if kept is None else pick(kept)",
           "kept = None if kept is None else kept[:, : depth + 1]", f"{TAPS} -k committed_tokens"),
    Mutant("features are appended by tokens", "core/loop.py", "append(features, checked.kept, cache.length)",
           "append(features, checked.kept, state.num_tokens)", f"{TAPS} -k committed_tokens"),
    Mutant("features of a prompt begin at its chunk", "core/prompts.py", "kept = append(kept, found, base + start)",
           "kept = append(kept, found, base)", f"{TAPS} -k committed_tokens"),
    Mutant("the drafter reads the kept taps", "core/prompts.py", "(*own, *(taps or ()))", "(*(taps or ()), *own)",
           f"{TAPS} -k committed_tokens"),
    Mutant("a lane keeps the features of its last job", "core/lanes.py",
           "_replace(cache=state.room.cache, features=state.room.kept)",
           "_replace(cache=state.room.cache, features=state.lanes.features[: len(state.waiting)])",
           f"{TAPS} -k replies"),
    Mutant("features of one reply per cycle are kept", "core/lanes.py",
           "jax.lax.while_loop(lambda carry: jnp.any(carry[0] < len(kept)), move, (at, kept))[1]",
           "move((at, kept))[1]", f"{TAPS} -k replies"),
    Mutant("features of plain steps are lost", "core/loop.py", "features=features,",
           "features=features if engine.drafter.num_nodes else state.features,", f"{TAPS} -k ladder"),
    Mutant("prompts are supervised", "training/on_policy.py", "text, is_text & (places >= begin),",
           "text, is_text & (places >= 0),", f"{POLICY} -k device"),
    Mutant("undefined features reach the gradient", "training/on_policy.py", "(places < ends - 1)[..., None]",
           "(places < ends)[..., None]", f"{POLICY} -k device"),
    Mutant("prompts are supervised on the host", "training/on_policy.py",
           "supervised[row, len(prompts[row // samples]) : count]", "supervised[row, 1:count]",
           f"{POLICY} -k over_the_texts"),
    Mutant("states of rollouts are one token late", "training/on_policy.py", "known[row, : min(len(states), count)]",
           "known[row, 1 : 1 + min(len(states), count)]", f"{POLICY} -k over_the_texts"),
    Mutant("an update runs the target", "training/on_policy.py", "parts.texts, mesh, parts.target_outputs",
           "parts.texts, mesh, None", f"{POLICY} -k over_the_texts"),
    Mutant("a head is not updated", "training/train_steps.py", "head = optax.apply_updates(state.head, updates)",
           "head = state.head", f"{POLICY} -k 'acceptance or one_program'"),
    Mutant("scores are not cumulative", "drafters/tree_growth.py", "values = (front.scores[:, :, None] + gains)",
           "values = (0 * front.scores[:, :, None] + gains)", "tests/drafters/test_drafters.py -k slow_version"),
    Mutant("a head is updated with the wrong token", "drafters/eagle.py",
           "return head.run(params, verified.next_tokens, states,", "return head.run(params, verified.tokens, states,",
           "tests/golden"),
    Mutant("d2t is ignored", "drafters/eagle.py", 'return draft_ids + params["drafter"]["d2t"][draft_ids]',
           "return draft_ids", "tests/drafters/test_drafters.py -k permute_its_ids"),
    Mutant("a small model's cache is one token short", "drafters/small_model.py",
           "tree, ahead=1, windows", "tree, windows", "tests/runtime/test_session.py -k 'differs_is_read and small'"),
    Mutant("NaN weights are accepted", "checkpoints/files/weights.py", "& integer(exponent)) == exponent",
           "& integer(exponent)) > exponent", "tests/checkpoints/test_finite.py"),
    Mutant("rows of a GGUF file stay permuted", "checkpoints/targets/gguf.py", ".swapaxes(1, 2)", "",
           "tests/checkpoints/test_gguf.py -k llama_tied"),
    Mutant("an lm_head that differs counts as tied", "checkpoints/targets/files.py",
           "return dataclasses.replace(config, tie_word_embeddings=False), table", "return config, table",
           "tests/checkpoints/test_target_files.py -k lm_head"),
    Mutant("the loss mask is one token off", "training/losses.py",
           "return ahead(texts.supervised, by) & same", "return ahead(texts.supervised, by + 1) & same",
           "tests/training/test_objective.py -k literal_version"),
    Mutant("documents of a row see each other", "training/unrolling.py",
           "same = segments[:, :, None] == segments[:, None, :]", "same = segments[:, :, None] >= 0",
           "tests/training/test_objective.py"),
    Mutant("the data's position is not restored", "data/corpus/documents.py",
           'self._iterator.set_state(state["position"])', "pass", "tests/data/test_corpus.py -k resumed_exactly"),
)  # fmt: skip


def main(words: list[str]) -> int:
    chosen = [mutant for mutant in MUTANTS if not words or any(word in mutant.name for word in words)]
    killed = 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as place:
        for folder in FOLDERS:
            shutil.copytree(ROOT / folder, Path(place, folder), ignore=shutil.ignore_patterns("__pycache__"))
        for file in ("pyproject.toml", "README.md"):
            shutil.copy(ROOT / file, place)
        for mutant in chosen:
            outcome = _outcome(mutant, Path(place))
            killed += outcome == "killed"
            print(f"{outcome:9} {mutant.name} ({mutant.file})", flush=True)
    print(f"killed {killed}/{len(chosen)}")
    return int(killed < len(chosen))


def _outcome(mutant: Mutant, place: Path) -> str:
    path = place / "eagle_jax" / mutant.file
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    if text.count(mutant.old) != 1:
        return "no line"
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    # A fault may make a loop endless: a test that does not end is red as well.
    options = "-q -x --timeout 300 --timeout-method thread -p no:cacheprovider -m 'not slow'"
    command = [sys.executable, "-m", "pytest", *shlex.split(options)]
    environment = os.environ | {
        "PYTHONPATH": str(place), "PYTHONDONTWRITEBYTECODE": "1", "JAX_COMPILATION_CACHE_DIR": str(place / "compiled"),
    }  # fmt: skip
    run = subprocess.run(
        [*command, *shlex.split(mutant.tests)], cwd=place, env=environment, capture_output=True, text=True, check=False
    )
    path.write_text(text, encoding="utf-8")
    if "+ Timeout +" in run.stdout + run.stderr:  # pytest-timeout ends the process
        return "killed"
    return {0: "SURVIVED", 1: "killed"}.get(run.returncode, f"error {run.returncode}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
