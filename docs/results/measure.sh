#!/bin/sh
# Measures everything of docs/results.md: four hours on two cores of an AMD EPYC. A second call continues a stopped one.
#   docs/results/measure.sh FOLDER      FOLDER has the papers' files, one folder per task
set -e
six=gsm8k,humaneval,mt_bench,alpaca,nq,cnn_dm
three=gsm8k,humaneval,mt_bench
bench() { name=$1; shift; python -m infer.bench --data "$folder" --out "runs/papers/$name" --resume "$@"; }
record() { name=$1; shift; python -m infer.acceptance --data "$folder" --out "runs/papers/$name" --resume "$@"; }
folder=$1

bench bench --methods sps,pld,lookahead,medusa,hydra,eagle1,hass,eagle3 --tasks $six --limit 4 --temperatures 0,1,1.5
bench ablation --methods hass@4x2x7,hass@4x2x7/confidence,hass@4x2x7/norerank,hass@4x2x7/confidence/norerank \
    --tasks $three --limit 4 --no-transformers
bench untempered --methods hass@untempered,eagle3@untempered --tasks $three --limit 4 --temperatures 1,1.5 --no-transformers
bench batches --methods hass@chain3,eagle3@chain3 --tasks gsm8k --limit 64 --batches 1,2,4,8,16,32,64 --no-transformers
bench rules --methods sps@chain4/deterministic,sps@chain4/rejection,sps@chain4/block,hass@static/deterministic,hass@static/rejection,hass@static/traversal \
    --tasks gsm8k,mt_bench --limit 4 --temperatures 1 --no-transformers
bench eagle2 --methods eagle2 --tasks $six --limit 4 --temperatures 0,1,1.5 --no-transformers
record trees --methods sps,pld,lookahead,medusa@static,hydra@static,eagle1,hass@6x10x59,eagle2@5x10x25,eagle2@6x10x59,eagle2@6x10x59/confidence,eagle2@6x10x59/norerank,eagle2@6x10x59/confidence/norerank,eagle3@8x10x59 \
    --tasks $six --limit 8 --chains ""
record drawn --methods sps@chain4/rejection,sps@chain4/block,eagle2@static/rejection,eagle2@static/traversal \
    --tasks $six --limit 8 --temperatures 1 --chains ""
record untempered_trees --methods medusa@static/untempered,hydra@static/untempered,eagle1@static/untempered,hass@6x10x59/untempered,eagle2@6x10x59/untempered,eagle3@8x10x59/untempered \
    --tasks $six --limit 8 --temperatures 1 --chains ""
record branching --methods eagle2@6x10x59/top_p0.9,eagle3@8x10x59/top_p0.9 --tasks $six --limit 8 --chains ""
record acceptance --methods hass,eagle2,eagle3,sps --tasks $three --limit 8 --chains 1,2,4,6
python -m infer.papers runs/papers/*/result.json --out runs/papers/report
