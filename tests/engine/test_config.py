"""config.json: the release's loads; every broken relation is refused with the field, the value, the rule."""

import copy
import json

import msgspec
import pytest

from rocline.engine.config import ConfigError, ModelConfig
from rocline.engine.release import RELEASE_CONFIG, release_config


def load(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    return ModelConfig.load(tmp_path)


def changed(path, value):
    """The release's configuration with one field replaced; `path` is dotted."""
    config = copy.deepcopy(RELEASE_CONFIG)
    *parents, field = path.split(".")
    section = config
    for parent in parents:
        section = section[parent]
    section[field] = value
    return config


def test_release_loads(tmp_path):
    config = load(tmp_path, RELEASE_CONFIG)
    assert config == release_config()
    text = config.text_config
    assert text.max_position_embeddings == 1_048_576  # case B35: YaRN's factor is in it already
    assert (text.rms_norm_eps, text.hc_eps) == (1e-20, 1e-6)
    assert [table.n_rows for table in text.engram_tables] == [384_006_168, 384_016_682]
    assert text.engram_width == 6144
    assert config.vision_config.max_wh_ratio is None


def test_release_roles(tmp_path):
    """The table of spec/backbone.md section 0."""
    roles = load(tmp_path, RELEASE_CONFIG).text_config.layers
    assert [role.layer for role in roles] == list(range(40))
    assert [role.ratio for role in roles] == [0] * 2 + [2] * 18 + [1] * 20
    assert [role.kv_source for role in roles] == [None] * 2 + [2] * 6 + [8] * 6 + [14] * 6 + [20] * 20
    sources = [None] * 2 + [2] * 6 + [8] * 6 + [14] * 6 + [20] * 4 + [24] * 4 + [28] * 4 + [32] * 4 + [36] * 4
    assert [role.index_source for role in roles] == sources

    def layers(field):
        return [role.layer for role in roles if getattr(role, field)]

    assert layers("owns_rows") == [2, 8, 14, 20]
    assert layers("has_indexer") == [2, 8, 14, 20, 24, 28, 32, 36]
    assert layers("writes_candidates") == [20]
    assert layers("reads_candidates") == [24, 28, 32, 36]
    assert {role.layer: role.engram for role in roles if role.engram is not None} == {1: 0, 14: 1}


@pytest.mark.parametrize("name", ["micro", "tiny", "tiny40", "dspark"])
def test_golden_configs_load(golden_or_skip, name):
    config = ModelConfig.load(golden_or_skip(f"{name}/model"))
    assert (config.vision_config is not None) == (name == "dspark")
    assert config.text_config.num_nextn_predict_layers == (3 if name == "dspark" else 0)


T = "text_config."
RATIOS = RELEASE_CONFIG["text_config"]["compress_ratios"]
BROKEN = [
    # path, value, then what the message must hold beside the field's own name
    ("bos_token_id", -1, "-1", "token id below vocab_size = 129280"),
    ("image_token_id", 129280, "129280", "token id below vocab_size = 129280"),
    ("quantization_config.quant_method", "awq", "awq", "only 'fp8'"),
    ("quantization_config.fmt", "e5m2", "e5m2", "only 'e4m3'"),
    ("quantization_config.activation_scheme", "static", "static", "only 'dynamic'"),
    ("quantization_config.weight_block_size", [128, 128], "(128, 128)", "only (32, 32)"),
    ("quantization_config.scale_fmt", "float", "float", "only 'ue8m0'"),
    ("quantization_config.expert_dtype", "fp8", "fp8", "only 'fp4'"),
    (T + "rope_scaling.rope_type", "linear", "linear", "only 'yarn'"),
    (T + "rope_scaling.factor", 0, "0", "positive"),
    (T + "rope_scaling.beta_fast", -32, "-32", "positive"),
    (T + "rope_scaling.beta_slow", 0, "0", "positive"),
    (T + "rope_scaling.original_max_position_embeddings", 0, "0", "positive"),
    (T + "vocab_size", 0, "0", "positive"),
    (T + "hidden_size", 5121, "5121", "multiple of 32"),
    (T + "moe_intermediate_size", 2300, "2300", "multiple of 32"),
    (T + "head_dim", 500, "500", "multiple of 32"),
    (T + "index_head_dim", 100, "100", "multiple of 32"),
    (T + "q_lora_rank", 1290, "1290", "multiple of 32"),
    (T + "engram_head_dim", 250, "250", "multiple of 32"),
    (T + "num_attention_heads", 60, "60", "multiple of o_groups = 8"),
    (T + "num_key_value_heads", 8, "8", "only 1"),
    (T + "n_shared_experts", 2, "2", "only 1"),
    (T + "norm_topk_prob", False, "False", "only True"),
    (T + "attention_bias", True, "True", "only False"),
    (T + "tie_word_embeddings", True, "True", "only False"),
    (T + "n_group", 8, "8", "not grouped"),
    (T + "topk_group", 4, "4", "not grouped"),
    (T + "qk_rope_head_dim", 63, "63", "even and at most 128"),
    (T + "qk_rope_head_dim", 256, "256", "even and at most 128"),
    (T + "num_experts_per_tok", 385, "385", "at most n_routed_experts = 384"),
    (T + "rms_norm_eps", 0.0, "0", "positive"),
    (T + "sliding_window", 0, "0", "positive"),
    (T + "max_position_embeddings", -1, "-1", "positive"),
    (T + "compress_ratios", RATIOS[:40], "40 entries", "num_hidden_layers + num_nextn_predict_layers = 43"),
    (T + "compress_ratios", [*RATIOS, 0], "44 entries", "= 43"),
    (T + "compress_ratios", [0, 4, *RATIOS[2:]], "4", "0, 1 or 2"),
    (T + "compress_ratios", [*RATIOS[:42], 1], "[0, 0, 1]", "draft stages"),
    (T + "kv_source_layer_ids", [2, 14, 8, 20], "[2, 14, 8, 20]", "ascending"),
    (T + "kv_source_layer_ids", [2, 8, 8, 14, 20], "[2, 8, 8, 14, 20]", "ascending"),
    (T + "kv_source_layer_ids", [2, 8, 14, 20, 40], "40", "below num_hidden_layers = 40"),
    (T + "kv_source_layer_ids", [1, 2, 8, 14, 20], "1", "compress_ratio is 0"),
    (T + "kv_source_layer_ids", [2, 8, 14, 20, 22], "22", "index_source_layer_ids"),
    # a reader before its source, of rows and of a selection
    (T + "kv_source_layer_ids", [8, 14, 20], "[8, 14, 20]", "layer 2 (ratio 2) reads compressed rows before"),
    (T + "kv_source_layer_ids", [2, 8, 14, 24], "[2, 8, 14, 24]", "layer 20 (ratio 1) reads"),
    (T + "index_source_layer_ids", [0, 2, 8, 14, 20, 24], "0", "ratio is 0"),
    (T + "index_source_layer_ids", [2, 8, 8, 14, 20], "[2, 8, 8, 14, 20]", "ascending"),
    (T + "candidate_source_layer_id", 14, "14", "compress_ratio 1"),
    (T + "candidate_source_layer_id", 24, "24", "key/value source"),
    (T + "candidate_topk_blocks", 64, "512", "(candidate_topk_blocks - 1) * candidate_block_size + 1 = 505"),
    (T + "index_topk", 0, "0", "positive"),
    (T + "engram_layer_ids", [14, 1], "[14, 1]", "ascending"),
    (T + "engram_layer_ids", [1, 40], "[1, 40]", "below num_hidden_layers = 40"),
    (T + "engram_num_embeddings", [384006168], "[384006168]", "[384006168, 384016682]"),
    (T + "engram_num_embeddings", [384006168, 384016683], "384016683", "primes"),
    (T + "engram_max_ngram_size", 1, "1", "at least 2"),
    (T + "engram_pad_token_id", 129280, "129280", "token id below 129280"),
    (T + "dspark_block_size", 0, "0", "positive"),
    (T + "dspark_markov_rank", 0, "0", "positive"),
    (T + "dspark_num_experts_per_tok", 129, "129", "at most 128"),
    (T + "dspark_noise_token_id", -1, "-1", "token id below 129280"),
    (T + "dspark_target_layer_ids", [37, 38, 40], "[37, 38, 40]", "below num_hidden_layers = 40"),
    (T + "dspark_target_layer_ids", [], "[]", "at least one layer"),
    (T + "num_nextn_predict_layers", -1, "-1", "negative"),
    ("vision_config.hidden_size", 1000, "1000", "multiple of num_attention_heads = 16"),
    ("vision_config.patch_size", 0, "0", "positive"),
    # of another type or kind
    (T + "hidden_act", "gelu", "gelu", ""),
    (T + "scoring_func", "sigmoid", "sigmoid", ""),
    (T + "topk_method", "greedy", "greedy", ""),
    ("model_type", "deepseek_v3", "deepseek_v3", ""),
    (T + "hidden_size", "5120", "", "Expected `int`, got `str`"),
    (T + "compress_ratios", 2, "", "Expected `array`, got `int`"),
]


@pytest.mark.parametrize(("path", "value", "shown", "rule"), BROKEN, ids=[f"{p}={v}" for p, v, *_ in BROKEN])
def test_broken_relation_is_named(tmp_path, path, value, shown, rule):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, changed(path, value))
    message = str(caught.value)
    assert path.split(".")[-1] in message
    assert shown in message
    assert rule in message


@pytest.mark.parametrize("field", ["vocab_size", "compress_ratios", "rope_scaling", "engram_layer_ids"])
def test_absent_field_is_named(tmp_path, field):
    config = copy.deepcopy(RELEASE_CONFIG)
    del config["text_config"][field]
    with pytest.raises(ConfigError, match=f"`{field}`"):
        load(tmp_path, config)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model_type": NaN}', "\ufeff{}", '{"x": ' + 10**5 * "["])
def test_unreadable_file_is_named(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        ModelConfig.load(tmp_path)


def test_absent_file_says_what_to_do(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json: No such file or directory; name a folder that holds a model"):
        ModelConfig.load(tmp_path)


def test_text_only_without_drafts(tmp_path):
    """Vision and drafts may be absent; so may fields that only repeat what is supported."""
    config = copy.deepcopy(RELEASE_CONFIG)
    del config["vision_config"]
    text = config["text_config"]
    text["compress_ratios"] = text["compress_ratios"][:40]
    for field in [field for field in text if field.startswith(("dspark_", "num_nextn"))]:
        del text[field]
    for field in ("hidden_act", "norm_topk_prob", "attention_bias", "tie_word_embeddings"):
        del text[field]
    loaded = load(tmp_path, config)
    assert loaded.vision_config is None
    assert loaded.text_config.layers == release_config().text_config.layers


def test_roles_follow_the_lists_not_the_numbers(golden_or_skip):
    """In the dspark configuration the candidate producer is layer 4 and only layer 5 reads from it."""
    roles = ModelConfig.load(golden_or_skip("dspark/model")).text_config.layers
    assert [role.kv_source for role in roles] == [None, 1, 1, 3, 4, 4, 4]
    assert [role.index_source for role in roles] == [None, 1, 1, 3, 4, 5, 5]
    assert [role.writes_candidates for role in roles] == [layer == 4 for layer in range(7)]
    assert [role.reads_candidates for role in roles] == [layer == 5 for layer in range(7)]


def test_config_is_frozen():
    with pytest.raises(AttributeError):
        release_config().text_config.hidden_size = 1  # type: ignore[misc]


def test_equal_files_give_equal_configs():
    again = msgspec.convert(json.loads(json.dumps(RELEASE_CONFIG)), ModelConfig)
    assert again == release_config()
