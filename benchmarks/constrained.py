"""What grammars cost the GPU: decode steps with a share of the rows held to one, beside free steps.

The rows' answers follow a schema without end over a made-up vocabulary of the shape's size. Masks
are built while the forward pass runs; the bubble counts the gap between forward and sampling.
"""

from __future__ import annotations

import json
import random

import torch
from llguidance import LLMatcher
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.bench_engine import BenchEngine, Window, engines
from benchmarks.report import Report, parser
from benchmarks.shapes import SHAPES, random_decoder
from replica.device.cuda import CudaDevice
from replica.sampling.grammars import Grammars

WORD = "abcdefghijklmnopqrstuvwxyz"


ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{2,20}$"},
        "kind": {"enum": ["person", "place", "thing"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 9999},
        "tags": {"type": "array", "items": {"type": "string"}, "minItems": 2, "maxItems": 4},
    },
    "required": ["name", "kind", "size", "tags"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": ITEM, "minItems": 100_000}


def vocabulary(size: int) -> str:
    """A byte-level tokenizer of `size` tokens, as JSON: all bytes, then pieces at random."""
    tokens = dict.fromkeys(sorted(pre_tokenizers.ByteLevel.alphabet()))
    chance = random.Random(0)
    while len(tokens) < size:
        length = chance.randint(2, 8)
        space = chance.choice(("", "Ġ"))
        letters = chance.choice((WORD, WORD, WORD, WORD.upper(), "0123456789", '",:{}[]'))
        tokens[space + "".join(chance.choices(letters, k=length))] = None
    ids = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer.to_str()


def add(report: Report, name: str, windows: list[Window]) -> None:
    report.add(f"step_ms.{name}", [window.step_ms for window in windows])
    report.add(f"bubble_share.{name}", [window.bubble_share for window in windows])
    report.add(f"host_ms.{name}", [window.host_ms for window in windows])


@torch.inference_mode()
def main() -> None:
    options = parser("constrained", __doc__)
    options.add_argument("--shape", choices=list(SHAPES), default="llama-8b")
    options.add_argument("--batch", type=int, default=64)
    options.add_argument("--constrained", type=int, help="rows; by default a quarter")
    options.add_argument("--prompt", type=int, default=1024)
    options.add_argument("--steps", type=int, default=300)
    chosen = options.parse_args()
    report, device, spec = Report("constrained"), CudaDevice(), SHAPES[chosen.shape]
    rows, prompt, steps = chosen.batch, chosen.prompt, chosen.steps
    held = rows // 4 if chosen.constrained is None else chosen.constrained
    grammars = Grammars(vocabulary(spec.vocab_size), spec.vocab_size, [])
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA))
    decoder = random_decoder(spec, torch.bfloat16, device.memory)
    with engines(decoder, device, rows, prompt + steps, ["on"], grammars) as made:
        engine: BenchEngine = made["on"]
        free = [engine.run(prompt, steps) for _ in range(chosen.runs)]
        mixed = [engine.run(prompt, steps, (held, grammar)) for _ in range(chosen.runs)]
    add(report, f"{rows}.free", free)
    add(report, f"{rows}.{held}_constrained", mixed)
    same = all(free[0].tokens[held:] == window.tokens[held:] for window in mixed)
    report.figures["free_rows_equal"] = float(same)
    report.write(chosen.json)


if __name__ == "__main__":
    main()
