"""Compressed token ids, bucket primes and multipliers (backbone.md section 11)."""

import json
import shutil

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from rocline.engine.config import ConfigError, ModelConfig
from rocline.engine.engram import EngramTable, compressed_id_map, load_id_map
from rocline.engine.ngrams import is_prime, ngram_tables

RELEASE_PRIMES = {  # first and last of each n-gram size
    1: (16000057, 16000183, 16000189, 16000321, 16000339, 16000463),
    14: (16000477, 16000627, 16000667, 16000769, 16000781, 16000889),
}
RELEASE_MULTIPLIERS = {
    1: (76632096046245, 4839876093313, 35959672319349, 73987337458391),
    14: (67716810739261, 51510806800915, 30921347202721, 82619226485591),
}


def test_the_releases_primes_and_multipliers():
    tables = ngram_tables([1, 14], 4, 8, 16_000_000, 99_092)
    assert [t.n_rows for t in tables] == [384_006_168, 384_016_682]
    for table in tables:
        picked = tuple(table.primes[column] for column in (0, 7, 8, 15, 16, 23))
        assert picked == RELEASE_PRIMES[table.layer]
        assert table.multipliers == RELEASE_MULTIPLIERS[table.layer]
        assert table.offsets[0] == 0
        assert table.offsets[23] == table.n_rows - table.primes[23]
        assert max(table.multipliers) * 99_091 < 2**63  # the products stay in int64
        assert max(table.multipliers) > 2**46


def test_primes_by_trial_division(rng):
    for n in [*range(60), *(int(n) for n in rng.integers(1000, 60_000, 40))]:
        assert is_prime(n) == (n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))), n
    for pseudoprime in (3_215_031_751, 341_550_071_728_321):  # strong to the bases 2, 3, 5, 7 (and 11, 13, 17)
        assert not is_prime(pseudoprime)


@pytest.mark.parametrize("name", ["micro", "tiny", "tiny40", "dspark"])
def test_maps_of_the_reference_tokenizers(name, data_folder, golden_or_skip):
    folder = data_folder / name
    folder = folder if folder.exists() else golden_or_skip(name)
    recorded = np.load(folder / "engram_map.npz")
    id_map = compressed_id_map(Tokenizer.from_file(str(folder / "model" / "tokenizer.json")))
    assert np.array_equal(id_map, recorded["map"])
    text = ModelConfig.load(folder / "model").text_config
    assert [m for t in text.engram_tables for m in t.multipliers] == recorded["multipliers"].flatten().tolist()
    assert [p for t in text.engram_tables for p in t.primes] == recorded["primes"].flatten().tolist()


def test_the_real_tokenizers_map_has_99092_ids(golden_or_skip):
    recorded = np.load(golden_or_skip("real_token_map.npz"))
    id_map = next(iter(recorded.values()))
    assert len(id_map) == 129_280
    assert len(np.unique(id_map)) == id_map.max() + 1 == 99_092
    assert id_map[:3].tolist() == [0, 1, 2]
    first_seen = np.unique(id_map, return_index=True)[1]
    assert np.array_equal(first_seen, np.sort(first_seen))  # numbered by first sight


def test_a_tokenizer_of_another_release_is_refused(data_folder, tmp_path):
    text = ModelConfig.load(data_folder / "micro" / "model").text_config
    assert load_id_map(data_folder / "micro" / "model", text).max() == 415
    shutil.copy(data_folder / "micro" / "model" / "tokenizer.json", tmp_path)
    raw = json.loads((tmp_path / "tokenizer.json").read_text())
    raw["added_tokens"].append({**raw["added_tokens"][-1], "id": 512, "content": "<new>"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=r"513 tokens with 417 compressed ids; config.json has vocab_size = 512"):
        load_id_map(tmp_path, text)
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        load_id_map(tmp_path / "nowhere", text)


def test_lookback_before_the_start_and_dead_tokens_stay_minus_one():
    ngrams = ngram_tables([1], 4, 2, 300, 416)[0]
    id_map = np.arange(10, dtype=np.int32) // 2
    table = EngramTable.build(ngrams, torch.empty(0), torch.empty(0), id_map, pad_token=2)
    assert table.pad == 1
    assert table.compressed(torch.tensor([[7, 2, -1, -1]], dtype=torch.int32)).tolist() == [[3, 1, -1, -1]]
