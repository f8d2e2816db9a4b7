"""A GGUF file is parsed once for config, tokenizer and weights, with the same result."""

import os

import pytest
import torch
from base_checkpoints import write_gguf
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

from liger_trainer.command.recipe.gguf_files import parsed_once
from liger_trainer.command.recipe.model_source import find_model

gguf = pytest.importorskip("gguf", reason="needs the package gguf")


@pytest.fixture
def counted(monkeypatch):
    """The files that are parsed, and the architectures whose names are worked out, as a list."""
    from gguf import gguf_reader, tensor_mapping

    calls = []
    build, make = gguf_reader.GGUFReader._build_fields, tensor_mapping.get_tensor_name_map

    def build_counted(self, *args):
        calls.append("file")
        return build(self, *args)

    def make_counted(*args):
        calls.append("names")
        return make(*args)

    monkeypatch.setattr(gguf_reader.GGUFReader, "_build_fields", build_counted)
    monkeypatch.setattr(tensor_mapping, "get_tensor_name_map", make_counted)
    monkeypatch.setattr(gguf, "get_tensor_name_map", make_counted)
    return calls


def load(source):
    config = source.load(AutoConfig)
    tokenizer = source.load(AutoTokenizer)
    model = source.load(AutoModelForCausalLM, quantization_config=GgufConfig(dequantize=True))
    return config, tokenizer, model


def test_a_file_is_parsed_once_with_the_same_result(tmp_path, counted):
    write_gguf(gguf, tmp_path / "small" / "tiny.gguf")
    source = find_model(str(tmp_path / "small"))
    assert source.is_gguf
    config, tokenizer, model = load(source)
    assert counted.count("file") == 1 and counted.count("names") <= 1
    reader = gguf.GGUFReader
    folder, file = source.path, source.options["gguf_file"]
    assert config.to_dict() == AutoConfig.from_pretrained(folder, gguf_file=file).to_dict()
    plain = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    assert tokenizer.get_vocab() == plain.get_vocab() and tokenizer("w1w2").input_ids == plain("w1w2").input_ids
    want = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file, quantization_config=GgufConfig(dequantize=True)
    ).state_dict()
    got = model.state_dict()
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor), name
    assert gguf.GGUFReader is reader and gguf.gguf_reader.GGUFReader is reader, "nothing of gguf stays replaced"


def test_a_file_that_has_changed_is_parsed_again(tmp_path, counted):
    path = tmp_path / "small" / "tiny.gguf"
    write_gguf(gguf, path)
    with parsed_once():
        first = gguf.GGUFReader(path)
        assert gguf.GGUFReader(path) is first
        os.utime(path, (1, 1))
        assert gguf.GGUFReader(path) is not first
    assert counted == ["file", "file"]


def test_gguf_is_as_before_after_an_error(tmp_path):
    reader, names = gguf.GGUFReader, gguf.get_tensor_name_map
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    with pytest.raises((ValueError, IndexError)), parsed_once():
        gguf.GGUFReader(broken)
    assert gguf.GGUFReader is reader and gguf.get_tensor_name_map is names
