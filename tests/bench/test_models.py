"""Whole models beside their own attention."""

from argparse import Namespace

import pytest
import torch

from bench import models, records

pytest.importorskip("transformers")
TINY = models.Size(2, 64, 2, torch.float32)


@pytest.fixture
def log(tmp_path):
    return records.Log.begin(
        "python -m bench.calls models", Namespace(device="cpu", out=tmp_path / "out.jsonl"), models.PEERS
    )


@pytest.mark.parametrize("name", ["Llama, padded", "T5, encoder, padded", "DeepSeek-V3", "Falcon"])
def test_a_model_is_timed_in_both_ways(name, log):
    models.measure(name, models.MODELS[name], TINY, log)
    found = records.read(log.out)[1:]
    assert sorted((r["contestant"], r["pass"]) for r in found) == [
        (who, direction) for who in ("own", "tilewise") for direction in ("both", "forward")
    ]
    assert all(r["value"] > 0 for r in found)


def test_a_model_whose_results_are_wrong_has_no_times(log, monkeypatch):
    right = models.made

    def made(x, size, way):
        model = right(x, size, way)
        if way == "tilewise":
            model.get_input_embeddings().weight.data.mul_(1.001)
        return model

    monkeypatch.setattr(models, "made", made)
    models.measure("Llama", models.MODELS["Llama"], TINY, log)
    (found,) = records.read(log.out)[1:]
    assert found["value"] is None
    assert "relative errors" in found["why"][0]


def test_padding_is_of_unequal_lengths_and_its_rows_count_for_nothing():
    given = models.padded(TINY, "cpu")
    assert given["attention_mask"].sum(1).tolist() == [61, 30]

    def model(input_ids, attention_mask):
        return (torch.ones(*input_ids.shape, 8),)

    assert models.forward(model, given).sum() == 91 * 8
