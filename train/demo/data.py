"""Builds the training mix of the bundled pair, and its tokenizer.

    python -m train.demo.data --data FOLDER --out runs/data

Sources:

- the Python standard library of the running interpreter, as text, and its functions as "Complete the code" chat turns
- `gsm8k/train.jsonl` below `--data`: the train split of openai/gsm8k, as chat turns
- `gpteacher/*.json` below `--data`: teknium1/GPTeacher, as chat turns

Two percent of each source are held out, chosen by a hash of the text. Writes `tokenizer/` (for
`transformers.AutoTokenizer`) and `gsm8k.jsonl`, `instruct.jsonl`, `completion.jsonl` and `code.jsonl`; held-out rows
go to `heldout/`.
"""

from __future__ import annotations

import ast
import collections
import dataclasses
import json
import logging
import sysconfig
import textwrap
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from eagle_jax.checkpoints import write_whole
from infer.common.programs import at_least_one, run

SOURCES = ("code", "completion", "gsm8k", "instruct")
SPECIAL = ("<|bos|>", "<|end|>", "<|user|>", "<|assistant|>", "<|pad|>")
# `generation` marks the assistant's tokens for loss masks. A system message joins the first user turn.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% set ns = namespace(system='') %}{% for message in messages %}"
    "{% if message['role'] == 'system' %}{% set ns.system = message['content'] + '\n\n' %}"
    "{% elif message['role'] == 'user' %}{{ '<|user|>' + ns.system + message['content'] }}{% set ns.system = '' %}"
    "{% elif message['role'] == 'assistant' %}{{ '<|assistant|>' }}"
    "{% generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ raise_exception('unknown role ' + message['role']) }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "turtledemo", "lib2to3",
           "encodings", "pydoc_data", "ensurepip", "__pycache__"}  # fmt: skip
COMPLETE = "Complete the code I provided.\n\n"


class Document(NamedTuple):
    """Holds a training text: a chat turn if it has a reply, otherwise plain text."""

    source: str
    text: str
    reply: str | None = None

    def row(self) -> str:
        """Returns the line of the file; a plain text includes its begin and end marks."""
        if self.reply is None:
            return json.dumps({"text": SPECIAL[0] + self.text + SPECIAL[1]}) + "\n"
        turns = (("user", self.text), ("assistant", self.reply))
        return json.dumps({"messages": [{"role": role, "content": content} for role, content in turns]}) + "\n"


@dataclasses.dataclass(frozen=True)
class Args:
    """Options of the program."""

    data: Path = Path("data")  # folder with gsm8k/ and gpteacher/
    out: Path = Path("runs/data")  # directory of tokenizer/ and the rows
    vocab_size: int = 512  # size of the tokenizer with special tokens
    max_characters: int = 1600  # longest chat turn; longer ones are left out


def standard_library() -> Iterator[str]:
    """Yields the source files of the standard library, without tests and generated tables."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if SKIPPED & set(path.relative_to(root).parts[:-1]) or path.name.startswith("_sysconfigdata"):
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        if text.isascii():
            yield text


def code_pieces(text: str, size: int = 1500) -> Iterator[str]:
    """Cuts a file at blank lines into pieces of about `size` characters."""
    piece = ""
    for block in text.split("\n\n"):
        piece += block + "\n\n"
        if len(piece) >= size:
            yield piece.strip("\n") + "\n"
            piece = ""
    if piece.strip():
        yield piece.strip("\n") + "\n"


def completions(text: str, limit: int) -> Iterator[Document]:
    """Yields functions with a docstring: the prompt is signature and docstring, the reply is the rest."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = ast.parse(text)
    lines = text.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or ast.get_docstring(node) is None or len(node.body) < 2:
            continue
        cut = node.body[0].end_lineno or node.lineno
        whole = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno])).split("\n")
        head = "\n".join(whole[: cut - node.lineno + 1])
        body = "\n".join(whole[cut - node.lineno + 1 :]).strip("\n")
        if body and len(head) + len(body) <= limit:
            yield Document("completion", COMPLETE + head + "\n", body)


def chat_turns(data: Path) -> Iterator[tuple[str, str, str]]:
    """Yields source, prompt and reply: GSM8K's questions, then GPTeacher's instructions by file."""
    with (data / "gsm8k" / "train.jsonl").open(encoding="utf-8") as rows:
        for row in map(json.loads, rows):
            yield "gsm8k", row["question"].strip(), row["answer"].strip()
    for path in sorted((data / "gpteacher").glob("*.json")):
        for row in json.loads(path.read_text(encoding="utf-8")):
            parts = row["instruction"].strip(), row.get("input", "").strip()
            yield path.stem, "\n\n".join(filter(None, parts)), row["response"].strip()


def documents(data: Path, limit: int) -> Iterator[Document]:
    """Yields the documents of the mix: no chat turn above `limit` characters or with much non-ASCII."""
    for text in standard_library():
        for piece in code_pieces(text):
            yield Document("code", piece)
        yield from completions(text, limit)
    for source, prompt, reply in chat_turns(data):
        odd = sum(ord(c) > 127 for c in prompt + reply)
        if source == "gsm8k":
            yield Document(source, prompt, reply)
        elif prompt and reply and len(prompt) + len(reply) <= limit and odd * 50 <= len(prompt) + len(reply):
            yield Document("instruct", prompt, reply)


def train_tokenizer(mix: list[Document], vocab_size: int) -> Tokenizer:
    """Trains byte-level BPE with single digits, so that numbers are copied digit by digit."""
    tokenizer = Tokenizer(models.BPE())
    digits, split = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, split])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(SPECIAL), initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator((part for doc in mix for part in (doc.text, doc.reply) if part), trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json as `transformers.AutoTokenizer` reads them."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": SPECIAL[0], "eos_token": SPECIAL[1],
              "pad_token": SPECIAL[4], "additional_special_tokens": list(SPECIAL[2:4]), "model_max_length": 2048,
              "clean_up_tokenization_spaces": False, "chat_template": CHAT_TEMPLATE}  # fmt: skip
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def main(args: Args) -> None:
    """Builds and writes everything."""
    at_least_one(args, "vocab_size", "max_characters")
    wanted = [args.data / "gsm8k" / "train.jsonl", args.data / "gpteacher"]
    if missing := [str(path) for path in wanted if not path.exists()]:
        raise ValueError(
            f"--data must hold GSM8K's train split and GPTeacher's JSON files, got {args.data} without "
            f"{' and '.join(missing)}. Download them there."
        )
    kept: list[Document] = []
    held: list[Document] = []
    for doc in documents(args.data, args.max_characters):
        (kept if zlib.crc32((doc.text + (doc.reply or "")).encode()) % 50 else held).append(doc)
    # Every third piece of the standard library is enough for the merges; it outweighs the chat data.
    sample = [doc for i, doc in enumerate(kept) if doc.source != "code" or i % 3 == 0]
    tokenizer = train_tokenizer(sample, args.vocab_size)
    save_tokenizer(tokenizer, args.out / "tokenizer")
    for directory, part in ((args.out, kept), (args.out / "heldout", held)):
        for source in SOURCES:
            write_whole(directory / f"{source}.jsonl", "".join(doc.row() for doc in part if doc.source == source))
        counts = collections.Counter(doc.source for doc in part)
        texts = [doc.text + (doc.reply or "") for doc in part]
        tokens = sum(len(encoding.ids) for encoding in tokenizer.encode_batch(texts))
        logging.info("%s: %s documents, %d tokens, %.2f characters per token", directory, dict(counts), tokens,
                     sum(map(len, texts)) / max(1, tokens))  # fmt: skip


if __name__ == "__main__":
    run(main, Args, __doc__, log="plain")
